/* What include/parity_dump.h needs of CUDA, where "the device" is the host: for tests without a GPU. */
#ifndef CUDA_ON_HOST_H
#define CUDA_ON_HOST_H
#include <string.h>

typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost = 2 };

static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind, (void)stream;
  if (!from) return cudaErrorInvalidValue;
  memcpy(to, from, bytes);
  return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}
static inline const char *cudaGetErrorString(cudaError_t error) { return error ? "invalid argument" : "no error"; }
#endif
