// What the attention kernels have in common: their arguments, and which positions a row sees.
#pragma once
#include "common.cuh"

struct AttentionArgs {
    const void* q;     // (T, H, E)
    const void* k;     // (S, K, E), the cache
    const void* v;     // (S, K, E), the cache
    void* out;         // (T, H, E)
    float* scores;     // (H, T, S), unscaled and unmasked, or null; not null where probs is not
    float* probs;      // (H, T, S), or null
    const int* first;  // position of row 0, (1,); S = first + T
    float* partial;    // attention_few: (T, H, splits, 4 more than the columns it is built for)
    uint32_t* arrived; // attention_few: (T, H), zero before and after
    int rows;          // T
    int heads;         // H
    int kv_heads;      // K
    int head_width;    // E, a multiple of 8
    int kv_modulo;     // head h reads h % K, by mistake
    int see_from_step; // a row sees from the start of the step, not of the cache, by mistake
    int see_shift;     // a row at position p sees up to p + shift: 0 in a healthy model
    int softmax;       // 1 in a healthy model
    float scale;       // 1/sqrt(E)
    int splits;        // attention_few: that there is room for
};

// What probabilities are multiplied by where they become two halves each: the lower one then keeps what counts.
#define PROB_UNIT 32768.0f

// Positions that the row at `position` sees: from <= s < to.
struct Window {
    int from, to;
};
DEVICE Window window(const AttentionArgs& a, int first, int t) {
    const int64_t to = (int64_t)first + t + a.see_shift + 1, cached = first + a.rows;
    Window w;
    w.from = a.see_from_step ? first : 0;
    w.to = t < a.rows ? (int)(to < 0 ? 0 : to < cached ? to : cached) : 0;
    return w;
}

DEVICE int kv_head_of(const AttentionArgs& a, int h) { return a.kv_modulo ? h % a.kv_heads : h / (a.heads / a.kv_heads); }

// A maximum of nothing is -infinity, which must not be subtracted from itself.
DEVICE float finite_or_zero(float x) { return x == -INFINITY_F ? 0.0f : x; }

// Probabilities of one row, which sees from <= s < to, from its stored scores, by all THREADS of the block.
template <int THREADS>
DEVICE void store_probs(const AttentionArgs& a, int h, int t, int from, int to, int cached, float highest, float total) {
    const int64_t row = ((int64_t)h * a.rows + t) * cached;
#pragma unroll 1
    for (int s = threadIdx.x; s < cached; s += THREADS) {
        const float x = a.scores[row + s] * a.scale;
        const bool sees = from <= s && s < to;
        a.probs[row + s] = !sees ? 0.0f : a.softmax ? expf(x - finite_or_zero(highest)) / total : x;
    }
}
