// Residual sum: out = scale[0]·branch + scale[1]·residual, with scales (1, 1) in a healthy model.
//
// Launch: grid (ceil(n / 256)), 256 threads, one element each, in f32. ggml: ggml_add (ADD).
#include "common.cuh"

struct AddArgs {
    const void* branch;    // (T, D)
    const void* residual;  // (T, D)
    void* out;             // (T, D)
    int64_t n;             // T·D
    float scale[2];
};

template <class S>
DEVICE void add(const AddArgs& a) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n) return;
    const float x = to_float(((const S*)a.branch)[i]), r = to_float(((const S*)a.residual)[i]);
    store((S*)a.out + i, a.scale[0] * x + a.scale[1] * r);
}

KERNEL(add_f32, AddArgs, add<float>)
KERNEL(add_f16, AddArgs, add<half_t>)
