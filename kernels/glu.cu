// Gated feed-forward activation: out = silu(gate)·up, silu(x) = x / (1 + e^-x).
//
// Launch: grid (ceil(T·F / 256)), 256 threads, one element each, in f32 with the accurate expf, tanhf, erff.
// ggml: ggml_swiglu_split (GLU).
#include "common.cuh"

// The variants of Activation and GluForm in src/model/graph.rs, in their order.
enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };
enum { GATE_TIMES_UP = 0, ACT_ON_UP = 1, NO_UP = 2 };

struct GluArgs {
    const void* gate;  // (T, F)
    const void* up;    // (T, F)
    void* out;         // (T, F)
    int64_t n;         // T·F
    int activation;
    int form;
};

DEVICE float activate(float x, int activation) {
    if (activation == SILU) return x / (1.0f + expf(-x));
    if (activation == GELU_TANH)  // sqrt(2/π)
        return 0.5f * x * (1.0f + tanhf(0.797884560802865356f * (x + 0.044715f * x * x * x)));
    return 0.5f * x * (1.0f + erff(x * 0.707106781186547524f));  // 1/sqrt(2)
}

template <class S>
DEVICE void glu(const GluArgs& a) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n) return;
    const float gate = to_float(((const S*)a.gate)[i]), up = to_float(((const S*)a.up)[i]);
    float y;
    if (a.form == ACT_ON_UP) y = gate * activate(up, a.activation);
    else y = activate(gate, a.activation) * (a.form == NO_UP ? 1.0f : up);
    store((S*)a.out + i, y);
}

KERNEL(glu_f32, GluArgs, glu<float>)
KERNEL(glu_f16, GluArgs, glu<half_t>)
