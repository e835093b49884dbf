// Weights decoded and rounded to f16, for linear_wide.cu: out[o, i] = f16(w[o, i]).
//
// Launch: grid (ceil(O·I / 2048)), 256 threads; a thread decodes 8 weights. ggml: dequantize_row_*.
#include "quants.cuh"

struct UnpackArgs {
    const uint8_t* weight;  // (O, I) in the weight format
    int64_t row_bytes;      // of one weight row
    void* out;              // (O, I) in f16
    int64_t groups;         // O·I/8
    int columns;            // I, a multiple of 8
};

template <class W>
DEVICE void unpack(const UnpackArgs& a) {
    const int64_t index = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (index >= a.groups) return;
    const int64_t row = index / (a.columns / 8);
    const int i = (int)(index - row * (a.columns / 8)) * 8;
    float w[8];
    W::decode8(a.weight + row * a.row_bytes, i, w);
    Half8 h;
#pragma unroll
    for (int j = 0; j < 8; j++) h.v[j] = to_half(w[j]);
    *(Half8*)((half_t*)a.out + index * 8) = h;
}

#define UNPACK(format, suffix) KERNEL(unpack_##suffix, UnpackArgs, unpack<format>)
FOR_EACH_FORMAT(UNPACK)
