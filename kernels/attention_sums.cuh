// What warps and blocks of attention_few leave of a head's row, each of its positions, and how that is added up: the maximum
// of the scores, the sum of e^(score - maximum), and that of the values weighted so; both sums shrink where another's
// maximum is higher (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
#pragma once
#include "attention.cuh"
#include "mma.cuh"

enum { SPLIT = 256, SPLITS_MAX = 64, FEW_WARPS = 8, KEYS_OF_TILE = 16, HEADS_OF_BLOCK = 8 };

template <int WIDTH>
struct Few {
    enum {
        UNITS = WIDTH / 32,           // of 16 bytes that a lane loads of a key: numbers q, q + 4, …
        COLUMNS = WIDTH / 8 < 8 ? 4 : 8,  // of a value that a lane loads at once
        PIECES = WIDTH / 8 / COLUMNS,
        TILES = WIDTH == 128 ? 1 : 2,  // of a warp under way at once
        STEP = FEW_WARPS * KEYS_OF_TILE * TILES,
        LANES = WIDTH / 4,  // that share a row of sums
        PARTIAL = WIDTH + 4,
    };
    struct alignas(2 * COLUMNS) Piece {
        uint32_t v[COLUMNS / 2];
    };
    struct Memory {
        alignas(16) float sum[FEW_WARPS][HEADS_OF_BLOCK][WIDTH];
        float highest[FEW_WARPS][HEADS_OF_BLOCK], total[FEW_WARPS][HEADS_OF_BLOCK];
        float share[HEADS_OF_BLOCK][SPLITS_MAX + 1];
        float top[HEADS_OF_BLOCK], whole[HEADS_OF_BLOCK];
    };
};

// What a row's positions, or some of them, come to: for one head.
struct Softened {
    float highest, total;
};

// Stores four columns of a head's result: x are the sums of 2^15 times the weighted values.
DEVICE void store_context(const AttentionArgs& a, int row, int column, const float x[4], float total) {
    if (column >= a.head_width) return;
    uint32_t* out = (uint32_t*)((half_t*)a.out + row * a.head_width + column);
    const float unit = 1.0f / PROB_UNIT / total;
#pragma unroll
    for (int j = 0; j < 2; j++) out[j] = two_halves_of(x[2 * j] * unit, x[2 * j + 1] * unit);
}

// Adds up what so many warps of this block have left: four columns of one head.
template <int WIDTH>
DEVICE Softened merge_warps(const typename Few<WIDTH>::Memory& memory, int warps, int head, int column, float x[4]) {
    Softened all = {-INFINITY_F, 0.0f};
    float highest[FEW_WARPS], total[FEW_WARPS];
    Float4 part[FEW_WARPS];
#pragma unroll
    for (int w = 0; w < FEW_WARPS; w++) {
        highest[w] = -INFINITY_F;
        if (w < warps) {
            highest[w] = memory.highest[w][head];
            total[w] = memory.total[w][head];
            part[w] = *(const Float4*)&memory.sum[w][head][column];
        }
    }
#pragma unroll
    for (int w = 0; w < FEW_WARPS; w++) all.highest = fmaxf(all.highest, highest[w]);
#pragma unroll
    for (int w = 0; w < FEW_WARPS; w++) {
        if (w >= warps) continue;
        const float share = expf(highest[w] - finite_or_zero(all.highest));
        all.total += total[w] * share;
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = fmaf(part[w].v[j], share, x[j]);
    }
    return all;
}

// Adds up what the blocks of a row have left: one head, by one warp; four columns from 4·(lane % LANES) on, in as many
// chains as lanes have the same columns, and a tree.
template <int WIDTH>
DEVICE Softened merge_splits(const float* partial, int splits, float* share, float x[4]) {
    enum { BESIDE = 32 / Few<WIDTH>::LANES, AT_ONCE = 8, HELD = SPLITS_MAX / 32 + 1 };
    const int lane = threadIdx.x % 32, stride = Few<WIDTH>::PARTIAL;
    float highest[HELD], counts[HELD], total = 0.0f;
    Float4 part[AT_ONCE];
    const auto load = [&](int s) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (s + BESIDE * n < splits)
                part[n] = load_fresh4(partial + (s + BESIDE * n) * stride + 4 * (lane % Few<WIDTH>::LANES));
    };
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        const int s = lane + 32 * n;
        highest[n] = s < splits ? load_fresh(partial + s * stride + WIDTH) : -INFINITY_F;
        counts[n] = s < splits ? load_fresh(partial + s * stride + WIDTH + 1) : 0.0f;
    }
    load(lane / Few<WIDTH>::LANES);
    float top = highest[0];
#pragma unroll
    for (int n = 1; n < HELD; n++) top = fmaxf(top, highest[n]);
    top = warp_max(top);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        const int s = lane + 32 * n;
        if (s >= splits) continue;
        share[s] = expf(highest[n] - finite_or_zero(top));
        total += counts[n] * share[s];
    }
    __syncwarp();
#pragma unroll 1
    for (int s = lane / Few<WIDTH>::LANES; s < splits; s += BESIDE * AT_ONCE) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (s + BESIDE * n < splits) x[j] = fmaf(part[n].v[j], share[s + BESIDE * n], x[j]);
        load(s + BESIDE * AT_ONCE);
    }
#pragma unroll
    for (int d = Few<WIDTH>::LANES; d < 32; d *= 2)
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] += __shfl_xor_sync(FULL_WARP, x[j], d);
    return Softened{top, warp_sum(total)};
}
