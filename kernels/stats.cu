// Comparison of a checkpoint with a reference on the device: what src/compare computes on the host.
//
// Launch: stats_part with grid (parts), then stats_merge with grid (1), 256 threads each. Sums in f64: each
// thread its strided share, then a tree in shared memory, in a fixed order. ggml has no such thing.
#include "common.cuh"

// What one comparison comes to. Sums and the maximum leave out pairs that are not two finite numbers.
struct Stats {
    double abs_err_max;      // max |a - b|, -1 where no pair is finite
    double squared_error;    // Σ (a - b)²
    double squared_a;        // Σ a²
    double squared_b;        // Σ b²
    double product;          // Σ a·b
    double abs_error;        // Σ |a - b|
    int64_t worst;           // the lowest index with the maximum
    int64_t positive;        // how often a > b
    int64_t nonfinite_a, nonfinite_b;
};

struct StatsArgs {
    const void* a;     // (n,), the candidate: f32, or f16
    const float* b;    // (n,), the reference
    Stats* parts;      // (parts,)
    Stats* out;        // (1,), of stats_merge
    int64_t n;
    int count;         // parts
    int a_f16;
};

DEVICE bool finite(float x) { return fabsf(x) < INFINITY_F; }

DEVICE Stats no_stats() {
    Stats s = {};
    s.abs_err_max = -1.0;
    return s;
}

DEVICE void merge_stats(Stats* into, const Stats& s) {
    if (s.abs_err_max > into->abs_err_max || (s.abs_err_max == into->abs_err_max && s.worst < into->worst)) {
        into->abs_err_max = s.abs_err_max;
        into->worst = s.worst;
    }
    into->squared_error += s.squared_error;
    into->squared_a += s.squared_a;
    into->squared_b += s.squared_b;
    into->product += s.product;
    into->abs_error += s.abs_error;
    into->positive += s.positive;
    into->nonfinite_a += s.nonfinite_a;
    into->nonfinite_b += s.nonfinite_b;
}

struct StatsScratch {
    Stats s[256];
};

// Merges what the 256 threads have; thread 0 writes it.
DEVICE void reduce_stats(StatsScratch& scratch, const Stats& mine, Stats* out) {
    scratch.s[threadIdx.x] = mine;
    __syncthreads();
    for (int d = 128; d > 0; d /= 2) {
        if ((int)threadIdx.x < d) merge_stats(&scratch.s[threadIdx.x], scratch.s[threadIdx.x + d]);
        __syncthreads();
    }
    if (threadIdx.x == 0) *out = scratch.s[0];
}

DEVICE void compare_part(const StatsArgs& a) {
    SHARED(StatsScratch, scratch);
    Stats mine = no_stats();
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < a.n; i += (int64_t)gridDim.x * 256) {
        const float x = a.a_f16 ? to_float(((const half_t*)a.a)[i]) : ((const float*)a.a)[i], y = a.b[i];
        mine.nonfinite_a += !finite(x);
        mine.nonfinite_b += !finite(y);
        if (!finite(x) || !finite(y)) continue;
        const double da = x, db = y, error = da - db, size = error < 0 ? -error : error;
        if (size > mine.abs_err_max) {
            mine.abs_err_max = size;
            mine.worst = i;
        }
        mine.squared_error += error * error;
        mine.squared_a += da * da;
        mine.squared_b += db * db;
        mine.product += da * db;
        mine.abs_error += size;
        mine.positive += error > 0;
    }
    reduce_stats(scratch, mine, a.parts + blockIdx.x);
}

DEVICE void compare_merge(const StatsArgs& a) {
    SHARED(StatsScratch, scratch);
    Stats mine = no_stats();
    for (int i = threadIdx.x; i < a.count; i += 256) merge_stats(&mine, a.parts[i]);
    reduce_stats(scratch, mine, a.out);
}

KERNEL(stats_part, StatsArgs, compare_part)
KERNEL(stats_merge, StatsArgs, compare_merge)
