// The activations of gated feed-forward layers, for glu.cu and for linear_few.cu, which must give the same bits.
#pragma once
#include "common.cuh"

// The variants of Activation and GluForm in src/model/graph.rs, in their order.
enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };
enum { GATE_TIMES_UP = 0, ACT_ON_UP = 1, NO_UP = 2 };

DEVICE float activate(float x, int activation) {
    if (activation == SILU) return x / (1.0f + expf(-x));
    if (activation == GELU_TANH)  // sqrt(2/π)
        return 0.5f * x * (1.0f + tanhf(0.797884560802865356f * (x + 0.044715f * x * x * x)));
    return 0.5f * x * (1.0f + erff(x * 0.707106781186547524f));  // 1/sqrt(2)
}
