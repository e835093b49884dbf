// Comparison of the token rows of a checkpoint with a reference on the device: what src/compare computes on the
// host, so that of a large prefill 96 bytes a row come back instead of the row.
//
// Launch: grid (T), 256 threads, a block per row. Sums in f64: each thread its strided share, then a tree in
// shared memory, in a fixed order. ggml has no such thing.
#include "common.cuh"

// One row. Sums, the maxima and the counts of signs leave out pairs that are not two finite numbers.
struct RowStats {
    double abs_error;        // Σ |a - b|
    double squared_error;    // Σ (a - b)²
    double squared_a;        // Σ a²
    double squared_b;        // Σ b²
    double product;          // Σ a·b
    double max;              // max |a - b|, 0 where no pair differs
    double ratio;            // max |a - b| / |b|, 0/0 counting as nothing
    int64_t column;          // the lowest one with the maximum, of a and b:
    float a, b;
    uint32_t positive;       // how often a > b
    uint32_t differing;      // how often a and b differ
    uint32_t nonfinite_a, nonfinite_b;
};

struct StatsArgs {
    const void* a;     // (T, W), the candidate: f32, or f16
    const float* b;    // (T, W), the reference
    RowStats* out;     // (T,)
    int64_t width;     // W
    int a_f16;
};

DEVICE bool finite(float x) { return fabsf(x) < INFINITY_F; }

DEVICE void merge_stats(RowStats* into, const RowStats& s) {
    if (s.max > into->max || (s.max == into->max && s.column < into->column)) {
        into->max = s.max;
        into->column = s.column;
        into->a = s.a;
        into->b = s.b;
    }
    into->abs_error += s.abs_error;
    into->squared_error += s.squared_error;
    into->squared_a += s.squared_a;
    into->squared_b += s.squared_b;
    into->product += s.product;
    if (s.ratio > into->ratio) into->ratio = s.ratio;
    into->positive += s.positive;
    into->differing += s.differing;
    into->nonfinite_a += s.nonfinite_a;
    into->nonfinite_b += s.nonfinite_b;
}

DEVICE void add_pair(RowStats* s, float x, float y, int64_t column) {
    s->nonfinite_a += !finite(x);
    s->nonfinite_b += !finite(y);
    if (!finite(x) || !finite(y)) return;
    const double a = x, b = y, error = a - b, size = error < 0 ? -error : error, whole = b < 0 ? -b : b;
    if (size > s->max) {
        s->max = size;
        s->column = column;
        s->a = x;
        s->b = y;
    }
    const double ratio = size > 0 ? size / whole : 0.0;
    if (ratio > s->ratio) s->ratio = ratio;
    s->abs_error += size;
    s->squared_error += error * error;
    s->squared_a += a * a;
    s->squared_b += b * b;
    s->product += a * b;
    s->positive += error > 0;
    s->differing += size > 0;
}

DEVICE void compare_rows(const StatsArgs& args) {
    struct Scratch {
        RowStats s[256];
    };
    SHARED(Scratch, scratch);
    const int64_t start = (int64_t)blockIdx.x * args.width;
    RowStats mine = {};
    mine.max = -1.0;  // of nothing
    mine.column = args.width;
    for (int64_t i = threadIdx.x; i < args.width; i += 256) {
        const float x = args.a_f16 ? to_float(((const half_t*)args.a)[start + i]) : ((const float*)args.a)[start + i];
        add_pair(&mine, x, args.b[start + i], i);
    }
    scratch.s[threadIdx.x] = mine;
    __syncthreads();
    for (int d = 128; d > 0; d /= 2) {
        if ((int)threadIdx.x < d) merge_stats(&scratch.s[threadIdx.x], scratch.s[threadIdx.x + d]);
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    RowStats& row = scratch.s[0];
    if (row.max < 0) row.max = 0;
    args.out[blockIdx.x] = row;
}

KERNEL(stats_rows, StatsArgs, compare_rows)
