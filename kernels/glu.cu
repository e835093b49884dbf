// Gated feed-forward activation: out = silu(gate)·up, silu(x) = x / (1 + e^-x).
//
// Launch: grid (ceil(T·F / 2048)), 256 threads, eight elements each, in f32 with the accurate expf, tanhf, erff.
// ggml: ggml_swiglu_split (GLU).
#include "activation.cuh"

struct GluArgs {
    const void* gate;  // (T, F)
    const void* up;    // (T, F)
    void* out;         // (T, F)
    int64_t n;         // T·F
    int activation;
    int form;
};

DEVICE float gated(float gate, float up, const GluArgs& a) {
    if (a.form == ACT_ON_UP) return gate * activate(up, a.activation);
    return activate(gate, a.activation) * (a.form == NO_UP ? 1.0f : up);
}

template <class S>
DEVICE void glu(const GluArgs& a) {
    const int64_t i = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8;
    const S *gate = (const S*)a.gate + i, *up = (const S*)a.up + i;
    S* out = (S*)a.out + i;
    if (i + 8 > a.n) {
        for (int j = 0; i + j < a.n; j++) store(out + j, gated(to_float(gate[j]), to_float(up[j]), a));
        return;
    }
    float x[8], y[8];
    load8(gate, x);
    load8(up, y);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = gated(x[j], y[j], a);
    store8(out, x);
}

KERNEL(glu_f32, GluArgs, glu<float>)
KERNEL(glu_f16, GluArgs, glu<half_t>)
