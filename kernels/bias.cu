// Bias: out[t, o] = x[t, o] + times·bias[o], with times = 1 in a healthy model.
//
// Launch: grid (ceil(T·O / 256)), 256 threads, one element each, in f32. ggml: ggml_add (ADD).
#include "common.cuh"

struct BiasArgs {
    const void* x;      // (T, O)
    const float* bias;  // (O,), or null: the input is copied
    void* out;          // (T, O)
    int64_t n;          // T·O
    int width;          // O
    float times;
};

template <class S>
DEVICE void bias(const BiasArgs& a) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n) return;
    const float x = to_float(((const S*)a.x)[i]);
    store((S*)a.out + i, a.bias ? x + a.times * a.bias[i % a.width] : x);
}

KERNEL(bias_f32, BiasArgs, bias<float>)
KERNEL(bias_f16, BiasArgs, bias<half_t>)
