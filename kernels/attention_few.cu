// Attention for few token rows, fast: as attention.cu, which is the plain kernel for this, of f16 values.
//
// Launch: grid (splits, T, H), 256 threads; a block has SPLIT = 256 positions of one row and head, of which its warps take
// AT_ONCE each by turns, so that all have some of a short cache: LANES lanes share a key, each with eight columns, in two
// chains of f32 and a tree, and the same columns of its value. HELD such rounds are under way at once, those of earlier
// steps' keys and values before the kernel ahead has ended; softmax is online from one to the next. A row's blocks leave
// their sums in `partial`, and the last one to arrive adds them up in the order of the positions: the result depends on
// the position alone, neither on how many splits there is room for nor on whether scores and probs are stored.
// ggml: ggml_flash_attn_ext (FLASH_ATTN_EXT), or MUL_MAT, SOFT_MAX, MUL_MAT.
#include "attention.cuh"

enum { SPLIT = 256, SPLIT_WARPS = 8, SPLITS_MAX = 1024 };

template <int WIDTH>
struct Few {
    enum {
        LANES = WIDTH / 8,              // that share a key
        AT_ONCE = 32 / LANES,           // keys of one load of a warp
        ROUND = SPLIT_WARPS * AT_ONCE,  // keys of one load of a block
        ROUNDS = SPLIT / ROUND,
        HELD = ROUNDS < 8 ? ROUNDS : 8,  // under way at once
        SOME = 2,                        // that are left out together
        GROUPS = 256 / WIDTH,            // of splits that are added up beside each other
    };
    struct Memory {
        float highest[SPLIT_WARPS], total[SPLIT_WARPS], sum[SPLIT_WARPS][WIDTH];
        float share[SPLITS_MAX], group[GROUPS][WIDTH];
        float top, whole;
    };
};

// Eight halves, two to a word.
DEVICE void unpack8(const Words4& words, float out[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = low_half(words.v[i]);
        out[2 * i + 1] = high_half(words.v[i]);
    }
}

// What a row's positions, or some of them, come to.
struct Softened {
    float highest, total;
};

// Adds up the warps' sums of this block: column c, for the thread that asks.
template <int WIDTH>
DEVICE float merge_warps(const typename Few<WIDTH>::Memory& memory, int c, Softened& all) {
    all.highest = -INFINITY_F;
#pragma unroll
    for (int w = 0; w < SPLIT_WARPS; w++) all.highest = fmaxf(all.highest, memory.highest[w]);
    float x = 0.0f;
    all.total = 0.0f;
#pragma unroll
    for (int w = 0; w < SPLIT_WARPS; w++) {
        const float share = expf(memory.highest[w] - finite_or_zero(all.highest));
        all.total += memory.total[w] * share;
        x += memory.sum[w][c] * share;
    }
    return x;
}

// Adds up what the blocks of a row have left, in their order. Every thread gets the row's maximum and total.
template <int WIDTH>
DEVICE Softened merge_splits(const float* partial, int splits, typename Few<WIDTH>::Memory& memory) {
    const int stride = WIDTH + 2, c = threadIdx.x % WIDTH, group = threadIdx.x / WIDTH;
    if (threadIdx.x < 32) {
        float top = -INFINITY_F;
        for (int s = threadIdx.x; s < splits; s += 32) top = fmaxf(top, load_fresh(partial + s * stride + WIDTH));
        top = warp_max(top);
        if (threadIdx.x == 0) memory.top = top;
    }
    __syncthreads();
    const float top = finite_or_zero(memory.top);
    for (int s = threadIdx.x; s < splits; s += 256) memory.share[s] = expf(load_fresh(partial + s * stride + WIDTH) - top);
    __syncthreads();
    float x = 0.0f;
    for (int s = group; s < splits; s += Few<WIDTH>::GROUPS) x += load_fresh(partial + s * stride + c) * memory.share[s];
    memory.group[group][c] = x;
    if (threadIdx.x == 0) {
        float whole = 0.0f;
        for (int s = 0; s < splits; s++) whole += load_fresh(partial + s * stride + WIDTH + 1) * memory.share[s];
        memory.whole = whole;
    }
    __syncthreads();
    Softened all;
    all.highest = memory.top;
    all.total = memory.whole;
    return all;
}

template <int WIDTH>
DEVICE void attention_few(const AttentionArgs& a) {
    typedef Few<WIDTH> F;
    SHARED(typename F::Memory, memory);
    const int t = blockIdx.y, h = blockIdx.z, lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32);
    const int first = warp_uniform(*a.first), cached = first + a.rows;
    const Window w = window(a, first, t);
    const int end = a.scores ? cached : w.to, splits = max(1, (end + SPLIT - 1) / SPLIT);
    if ((int)blockIdx.x >= splits) return;
    const int64_t stride = (int64_t)a.kv_heads * a.head_width;
    const int column = lane % F::LANES * 8, from = blockIdx.x * SPLIT, key = from + F::AT_ONCE * warp + lane / F::LANES;
    const bool inside = column < a.head_width;
    const int64_t at = kv_head_of(a, h) * a.head_width + (inside ? column : 0);
    const int rounds = (min((int)SPLIT, end - from) + F::ROUND - 1) / F::ROUND;  // of the block's warps

    // Earlier steps' keys and values before the kernel ahead has ended, this step's after it. What the row does not see is
    // 0, and counts as nothing: it may be no number.
    const Words4 zero = {};
    Words4 keys[F::HELD], values[F::HELD];
    const auto load = [&](int round, int begin, int to) {
#pragma unroll
        for (int some = 0; some < F::HELD; some += F::SOME) {
            const int start = from + (round + some) * F::ROUND;
            if (start + F::SOME * F::ROUND <= begin || start >= to) continue;
#pragma unroll
            for (int i = some; i < some + F::SOME; i++) {
                const int s = key + F::ROUND * (round + i);
                if (!inside || s < begin || s >= to) continue;
                keys[i] = *(const Words4*)((const half_t*)a.k + s * stride + at);
                if (w.from <= s && s < w.to) values[i] = *(const Words4*)((const half_t*)a.v + s * stride + at);
            }
        }
    };
    const auto clear = [&] {
#pragma unroll
        for (int i = 0; i < F::HELD; i++) keys[i] = values[i] = zero;
    };
    clear();
    load(0, 0, min(first, end));
    wait_for_last();
    float q[8] = {};
    if (inside) load8((const half_t*)a.q + ((int64_t)t * a.heads + h) * a.head_width + column, q);
    load(0, first, end);

    float highest = -INFINITY_F, total = 0.0f, sum[8] = {};
#pragma unroll 1
    for (int round = 0; round < rounds; round += F::HELD) {
        if (round > 0) {
            clear();
            load(round, 0, end);
        }
        float score[F::HELD], higher = highest;
        const bool many = rounds - round > F::HELD / 2;  // or the second half is empty
#pragma unroll
        for (int i = 0; i < F::HELD; i++) score[i] = -INFINITY_F;
        const auto multiply = [&](int begin) {
            float x[F::HELD / 2];
#pragma unroll
            for (int i = 0; i < F::HELD / 2; i++) {
                float k[8], chain[2] = {};
                unpack8(keys[begin + i], k);
#pragma unroll
                for (int j = 0; j < 8; j++) chain[j % 2] = fmaf(q[j], k[j], chain[j % 2]);
                x[i] = chain[0] + chain[1];
            }
#pragma unroll
            for (int d = 1; d < F::LANES; d *= 2)
#pragma unroll
                for (int i = 0; i < F::HELD / 2; i++) x[i] += __shfl_xor_sync(FULL_WARP, x[i], d);
#pragma unroll
            for (int i = 0; i < F::HELD / 2; i++) {
                const int s = key + F::ROUND * (round + begin + i);
                if (a.scores && column == 0 && s < cached) a.scores[((int64_t)h * a.rows + t) * cached + s] = x[i];
                if (w.from <= s && s < w.to) score[begin + i] = x[i] * a.scale;
                higher = fmaxf(higher, score[begin + i]);
            }
        };
        multiply(0);
        if (many) multiply(F::HELD / 2);
#pragma unroll
        for (int d = F::LANES; d < 32; d *= 2) higher = fmaxf(higher, __shfl_xor_sync(FULL_WARP, higher, d));
        const float shrink = expf(highest - finite_or_zero(higher));
        highest = higher;
        total *= shrink;
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] *= shrink;
        const auto add = [&](int begin) {
#pragma unroll
            for (int i = begin; i < begin + F::HELD / 2; i++) {
                const float p = expf(score[i] - finite_or_zero(highest));
                float v[8];
                unpack8(values[i], v);
                total += p;
#pragma unroll
                for (int j = 0; j < 8; j++) sum[j] = fmaf(p, v[j], sum[j]);
            }
        };
        add(0);
        if (many) add(F::HELD / 2);
    }
#pragma unroll
    for (int d = F::LANES; d < 32; d *= 2) {
        total += __shfl_xor_sync(FULL_WARP, total, d);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], d);
    }
    if (lane == 0) memory.highest[warp] = highest;
    if (lane == 0) memory.total[warp] = total;
    if (lane < F::LANES)
#pragma unroll
        for (int j = 0; j < 8; j++) memory.sum[warp][column + j] = sum[j];
    __syncthreads();

    const int c = threadIdx.x % WIDTH, row = t * a.heads + h;
    half_t* out = (half_t*)a.out + (int64_t)row * a.head_width;
    const bool stores = (int)threadIdx.x < a.head_width;
    Softened all;
    float x = merge_warps<WIDTH>(memory, c, all);
    if (splits > 1) {
        float* partial = a.partial + ((int64_t)row * a.splits + blockIdx.x) * (WIDTH + 2);
        if (threadIdx.x < WIDTH) partial[c] = x;
        if (threadIdx.x == 0) partial[WIDTH] = all.highest;
        if (threadIdx.x == 0) partial[WIDTH + 1] = all.total;
        if (!is_last(a.arrived + row, splits)) return;
        all = merge_splits<WIDTH>(a.partial + (int64_t)row * a.splits * (WIDTH + 2), splits, memory);
        x = 0.0f;
#pragma unroll
        for (int g = 0; g < F::GROUPS; g++) x += memory.group[g][c];
    }
    if (w.to <= w.from) all.total = 1.0f;  // a row that sees nothing is 0
    if (stores) store(out + c, x / all.total);
    // This block's scores were written before its warps were merged, those of others before it knew to be the last.
    if (a.probs) store_probs<256>(a, h, t, w.from, w.to, cached, all.highest, all.total);
}

#define ATTENTION_FEW(width) KERNEL_AHEAD(attention_few_##width, AttentionArgs, 256, 1, attention_few<width>)
ATTENTION_FEW(32)
ATTENTION_FEW(64)
ATTENTION_FEW(128)
