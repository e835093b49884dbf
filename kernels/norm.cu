// RMS norm of groups of columns: y = x / sqrt(mean(x²) + eps) · w.
//
// A group is a row of (T, D), or one head of one row for the per-head norms of qwen3.
// Launch: grid (groups), a block of whole warps, at most 256 threads. The mean is summed in f64, each
// thread its strided share, then a shuffle tree; the rest is f32. ggml: ggml_rms_norm and ggml_mul.
#include "common.cuh"

// The variants of NormStyle in src/model/graph.rs, in its order.
enum { RMS = 0, NO_WEIGHT = 1, WEIGHT_TWICE = 2, LAYER_NORM = 3, UNIT_OFFSET = 4 };

struct NormArgs {
    const void* x;        // (groups, width)
    const float* weight;  // (width,)
    void* out;            // (groups, width)
    double eps;
    int width;
    int style;
};

// Hands y[i] = x[i] / sqrt(mean(x²) + eps) · weight[i] to `put(i, y[i])`, each thread its strided share. The mean is
// summed in f64, each thread its share, then a shuffle tree; the rest is f32.
template <class S, class Put>
DEVICE void norm_columns(const S* x, const float* weight, double eps, int width, int style, double sums[32], Put put) {
    // The first of a thread's columns are read once.
    enum { HELD = 8 };
    float held[HELD], weights[HELD];
    const int step = blockDim.x, rest = threadIdx.x + HELD * step;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const int i = threadIdx.x + k * step;
        held[k] = i < width ? to_float(x[i]) : 0.0f;
        weights[k] = i < width ? weight[i] : 0.0f;
    }
    float mean = 0.0f;
    if (style == LAYER_NORM) {
        double sum = 0.0;
#pragma unroll
        for (int k = 0; k < HELD; k++) sum += held[k];
        for (int i = rest; i < width; i += step) sum += to_float(x[i]);
        mean = (float)(block_sum(sum, sums) / width);
    }
    double squares = 0.0;
    const auto add = [&](float value) {
        const float d = value - mean;
        squares += (double)d * d;
    };
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if ((int)threadIdx.x + k * step < width) add(held[k]);
    for (int i = rest; i < width; i += step) add(to_float(x[i]));
    squares = block_sum(squares, sums);
    const float scale = (float)(1.0 / sqrt(squares / width + eps));
    const auto finish = [&](int i, float value, float w) {
        float y = (value - mean) * scale;
        if (style != NO_WEIGHT) y *= style == UNIT_OFFSET ? 1.0f + w : w;
        if (style == WEIGHT_TWICE) y *= w;
        put(i, y);
    };
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if ((int)threadIdx.x + k * step < width) finish(threadIdx.x + k * step, held[k], weights[k]);
    for (int i = rest; i < width; i += step) finish(i, to_float(x[i]), weight[i]);
}

template <class S>
DEVICE void norm(const NormArgs& a) {
    struct Scratch {
        double sums[32];
    };
    SHARED(Scratch, scratch);
    const S* x = (const S*)a.x + (int64_t)blockIdx.x * a.width;
    S* out = (S*)a.out + (int64_t)blockIdx.x * a.width;
    norm_columns<S>(x, a.weight, a.eps, a.width, a.style, scratch.sums, [&](int i, float y) { store(out + i, y); });
}

KERNEL(norm_f32, NormArgs, norm<float>)
KERNEL(norm_f16, NormArgs, norm<half_t>)
