// A kernel and the three lines that dump what it wrote: `nvcc -I../../../include norm.cu -o norm && ./norm out`.
#include <cmath>
#include <vector>

#include "parity_dump.h"

// RMS norm of n rows of `width` f32 values, one block a row.
__global__ void rms_norm(const float *x, const float *weight, float *out, int width, float eps) {
  __shared__ float squares;
  if (threadIdx.x == 0) squares = 0;
  __syncthreads();
  const float *row = x + size_t(blockIdx.x) * width;
  float own = 0;
  for (int i = threadIdx.x; i < width; i += blockDim.x) own += row[i] * row[i];
  atomicAdd(&squares, own);
  __syncthreads();
  float scale = rsqrtf(squares / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[size_t(blockIdx.x) * width + i] = row[i] * scale * weight[i];
}

int main(int count, char **arguments) {
  const int n = 3, width = 256;
  const int32_t tokens[n] = {312, 863, 2039};
  std::vector<float> host(n * width), ones(width, 1.0f);
  for (int i = 0; i < n * width; i++) host[i] = sinf(0.1f * i);
  float *x, *weight, *out;
  cudaMalloc(&x, n * width * sizeof *x), cudaMalloc(&out, n * width * sizeof *out), cudaMalloc(&weight, width * sizeof *weight);
  cudaMemcpy(x, host.data(), n * width * sizeof *x, cudaMemcpyHostToDevice);
  cudaMemcpy(weight, ones.data(), width * sizeof *weight, cudaMemcpyHostToDevice);
  cudaStream_t stream = 0;
  parity_dump *dump = parity_dump_open(count > 1 ? arguments[1] : "out", "cuda-example", "1", "f32");
  parity_dump_begin_step(dump, tokens, NULL, n);
  rms_norm<<<n, 128, 0, stream>>>(x, weight, out, width, 1e-6f);
  parity_dump_device_tensor(dump, -1, "embed", PARITY_F32, x, n, width, 0, stream);
  parity_dump_device_tensor(dump, 0, "attn_norm", PARITY_F32, out, n, width, 0, stream);
  parity_dump_end_step(dump);
  return parity_dump_close(dump) ? 1 : 0;
}
