// Grouped-query attention with a causal mask, as one: scores = q·k, probs = softmax(scale·scores + mask),
// ctx = probs·v. Query head h reads key/value head h / (H/K).
//
// Launch: grid (ceil(T / ROWS), H), 256 threads; a block has ROWS token rows of one head. Each warp takes
// every eighth chunk of 32 keys: a lane has the scores of one key, in four chains of f32, then softmax by lanes
// across the keys, online (Milakov & Gimelshein, arXiv 1805.02867): where a chunk raises the maximum, the sums so
// far are scaled down. Values are summed by lanes across the head, CHUNKS columns each. At the end the eight
// warps' sums are merged. The result of a row depends neither on ROWS nor on whether scores and probs are
// stored. ggml: ggml_flash_attn_ext (FLASH_ATTN_EXT), or MUL_MAT, SOFT_MAX, MUL_MAT.
#include "attention.cuh"

enum { WARPS = 8 };
// Loads of keys and of values that are under way at once, as far as there are registers for them.
#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ >= 900
enum { ROW_KEYS = 8, ROW_VALUES = 16, TILE_VALUES = 8 };
#else
enum { ROW_KEYS = 4, ROW_VALUES = 4, TILE_VALUES = 2 };
#endif

template <class X, int N>
struct alignas(sizeof(X) * N) Group {
    X v[N];
};

// This lane's columns of a head, CHUNKS · lane and what follows; any beyond the head, whose width CHUNKS divides.
template <class X, int CHUNKS>
DEVICE void load_columns(const X* p, int width, float out[CHUNKS]) {
    const int at = min((int)threadIdx.x % 32 * CHUNKS, width - CHUNKS);
    const Group<X, CHUNKS> group = *(const Group<X, CHUNKS>*)(p + at);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) out[c] = to_float(group.v[c]);
}

// Scores of one key, q·k, for all rows of a block.
template <class KV, int CHUNKS, int ROWS>
DEVICE void dot_rows(const float (&q)[ROWS][32 * CHUNKS], const KV* key, int width, float score[ROWS]) {
    float chain[ROWS][4] = {};
#pragma unroll (ROWS == 1 ? ROW_KEYS : 4)
    for (int i = 0; i < width; i += 8) {
        float k[8];
        load8(key + i, k);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float x[8];
            load8(&q[r][i], x);
#pragma unroll
            for (int j = 0; j < 8; j++) chain[r][j % 4] = fmaf(x[j], k[j], chain[r][j % 4]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) score[r] = (chain[r][0] + chain[r][1]) + (chain[r][2] + chain[r][3]);
}

// Adds 32 values, weighted. What a row does not see is left out, not multiplied by 0: it may be no number.
template <bool MASKED, class KV, int CHUNKS, int ROWS>
DEVICE void add_values(const float (&prob)[32][ROWS], const uint32_t seen[ROWS], const KV* v, int64_t stride, int last,
                       int width, float sum[ROWS][CHUNKS]) {
#pragma unroll (ROWS == 1 ? ROW_VALUES : TILE_VALUES)
    for (int j = 0; j < 32; j++) {
        float value[CHUNKS];
        load_columns<KV, CHUNKS>(v + min(j, last) * stride, width, value);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float p = prob[j][r];
            const bool sees = !MASKED || (seen[r] >> j & 1);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) sum[r][c] = sees ? fmaf(p, value[c], sum[r][c]) : sum[r][c];
        }
    }
}

template <class S, class KV, int CHUNKS, int ROWS>
DEVICE void attention(const AttentionArgs& a) {
    struct Merge {
        alignas(16) float q[ROWS][32 * CHUNKS];
        alignas(16) float prob[WARPS][32][ROWS];
        float highest[WARPS][ROWS], total[WARPS][ROWS], sum[WARPS][ROWS][32 * CHUNKS];
    };
    SHARED(Merge, merge);
    const int h = blockIdx.y, t0 = blockIdx.x * ROWS, lane = threadIdx.x % 32;
    const int warp = warp_uniform(threadIdx.x / 32);
    const int first = warp_uniform(*a.first), cached = first + a.rows;
    const int kv_head = kv_head_of(a, h);
    const int64_t kv_stride = (int64_t)a.kv_heads * a.head_width;
    const KV* k = (const KV*)a.k + kv_head * a.head_width;
    const KV* v = (const KV*)a.v + kv_head * a.head_width;

    float sum[ROWS][CHUNKS] = {}, highest[ROWS], total[ROWS];
    int end = a.scores ? cached : 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int t = t0 + r < a.rows ? t0 + r : a.rows - 1;
        const S* q = (const S*)a.q + ((int64_t)t * a.heads + h) * a.head_width;
        for (int c = threadIdx.x; c < 32 * CHUNKS; c += 256) merge.q[r][c] = c < a.head_width ? to_float(q[c]) : 0.0f;
        highest[r] = a.softmax ? -INFINITY_F : 0.0f;
        total[r] = 0.0f;
        end = max(end, window(a, first, t0 + r).to);
    }
    __syncthreads();

#pragma unroll 1
    for (int chunk = warp * 32; chunk < end; chunk += WARPS * 32) {
        float score[ROWS];
        const KV* key = k + min(chunk + lane, cached - 1) * kv_stride;
        dot_rows<KV, CHUNKS, ROWS>(merge.q, key, a.head_width, score);
        // Softmax so far. `prob` is not yet divided by the total.
        const int s = chunk + lane;
        uint32_t seen[ROWS];
        bool all_seen = true;
        __syncwarp();  // what the last chunk left has been read
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Window w = window(a, first, t0 + r);
            const bool sees = w.from <= s && s < w.to;
            if (a.scores && t0 + r < a.rows && s < cached)
                a.scores[((int64_t)h * a.rows + t0 + r) * cached + s] = score[r];
            seen[r] = __ballot_sync(FULL_WARP, sees);
            all_seen &= seen[r] == FULL_WARP;
            const float x = score[r] * a.scale;
            const float higher = a.softmax ? fmaxf(highest[r], warp_max(sees ? x : -INFINITY_F)) : 0.0f;
            const float shrink = expf(highest[r] - finite_or_zero(higher));
            const float prob = !sees ? 0.0f : a.softmax ? expf(x - finite_or_zero(higher)) : x;
            merge.prob[warp][lane][r] = prob;
            total[r] = total[r] * shrink + warp_sum(prob);
            highest[r] = higher;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) sum[r][c] *= shrink;
        }
        __syncwarp();
        const KV* values = v + chunk * kv_stride;
        const int last = cached - 1 - chunk;
        if (warp_uniform(all_seen))
            add_values<false, KV, CHUNKS, ROWS>(merge.prob[warp], seen, values, kv_stride, last, a.head_width, sum);
        else add_values<true, KV, CHUNKS, ROWS>(merge.prob[warp], seen, values, kv_stride, last, a.head_width, sum);
    }

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (lane == 0) merge.highest[warp][r] = highest[r];
        if (lane == 0) merge.total[warp][r] = total[r];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) merge.sum[warp][r][lane * CHUNKS + c] = sum[r][c];
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < ROWS && t0 + r < a.rows; r++) {
        const int t = t0 + r;
        float top = -INFINITY_F, whole = 0.0f, share[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, merge.highest[w][r]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            share[w] = expf(merge.highest[w][r] - finite_or_zero(top));
            whole += merge.total[w][r] * share[w];
        }
        const Window w = window(a, first, t);
        if (!a.softmax || w.to <= w.from) whole = 1.0f;  // a row that sees nothing is 0
#pragma unroll 1
        for (int c = threadIdx.x; c < a.head_width; c += 256) {
            float x = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) x += merge.sum[w][r][c] * share[w];
            store((S*)a.out + ((int64_t)t * a.heads + h) * a.head_width + c, x / whole);
        }
        if (a.probs) store_probs<256>(a, h, t, w.from, w.to, cached, top, whole);
    }
}

// Several rows a block for prefill, where the rows share what is read of the cache; one for decode.
#define ATTENTION(name, S, KV, CHUNKS)                                       \
    KERNEL(attention_row_##name, AttentionArgs, attention<S, KV, CHUNKS, 1>) \
    KERNEL(attention_tile_##name, AttentionArgs, attention<S, KV, CHUNKS, 4>)
#define ATTENTION_WIDTHS(types, S, KV) \
    ATTENTION(types##_32, S, KV, 1) ATTENTION(types##_64, S, KV, 2) ATTENTION(types##_128, S, KV, 4)
ATTENTION_WIDTHS(f32_f32, float, float)
ATTENTION_WIDTHS(f32_f16, float, half_t)
ATTENTION_WIDTHS(f16_f16, half_t, half_t)
