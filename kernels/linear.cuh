// Arguments of the matrix products: out[t, o] = Σ_i x[t, i]·w[o, i].
#pragma once
#include "quants.cuh"

struct LinearArgs {
    const uint8_t* weight;  // (O, I) in the weight format, decoded inside the kernel
    int64_t row_bytes;      // of one weight row
    const void* x;          // (T, I)
    void* out;              // (T, O)
    int rows;               // T
    int columns;            // I, a multiple of 8
    int outputs;            // O
    int out_f32;            // whether out is f32 although x is f16 (the logits)
};

template <class S>
DEVICE void store_output(const LinearArgs& a, int t, int o, float value) {
    const int64_t i = (int64_t)t * a.outputs + o;
    if (a.out_f32) ((float*)a.out)[i] = value;
    else store((S*)a.out + i, value);
}
