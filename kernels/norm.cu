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

template <class S>
DEVICE void norm(const NormArgs& a) {
    struct Scratch {
        double sums[32];
    };
    SHARED(Scratch, scratch);
    const S* x = (const S*)a.x + (int64_t)blockIdx.x * a.width;
    S* out = (S*)a.out + (int64_t)blockIdx.x * a.width;

    float mean = 0.0f;
    if (a.style == LAYER_NORM) {
        double sum = 0.0;
        for (int i = threadIdx.x; i < a.width; i += blockDim.x) sum += to_float(x[i]);
        mean = (float)(block_sum(sum, scratch.sums) / a.width);
    }
    double squares = 0.0;
    for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
        const float d = to_float(x[i]) - mean;
        squares += (double)d * d;
    }
    squares = block_sum(squares, scratch.sums);
    const float scale = (float)(1.0 / sqrt(squares / a.width + a.eps));
    for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
        const float w = a.weight[i];
        float y = (to_float(x[i]) - mean) * scale;
        if (a.style != NO_WEIGHT) y *= a.style == UNIT_OFFSET ? 1.0f + w : w;
        if (a.style == WEIGHT_TWICE) y *= w;
        store(out + i, y);
    }
}

KERNEL(norm_f32, NormArgs, norm<float>)
KERNEL(norm_f16, NormArgs, norm<half_t>)
