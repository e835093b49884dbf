// Attention for few token rows, fast: as attention.cu, which is the plain kernel for this, of f16 values.
//
// Launch: grid (splits, T, K · ceil(G / 8)), 256 threads; G = H / K heads read the same keys, and a block has up to eight
// of them, one token row and a span of its positions, of which a warp takes KEYS_OF_TILE by turns with the others. Scores
// are products on tensor cores of f16 operands with sums in f32: heads are rows of the instruction, keys its columns, and
// which columns of a head make its depth is chosen so that a lane loads 16 bytes of a key at once. Softmax is online.
// Probabilities go to the tensor cores as the sum of two halves, as in attention_mma.cu: rows g and g + 8 of one
// instruction, whose columns are those of the values. (An infinite value that counts for less than 2^-40 makes a sum that
// is no number.) Keys and values of earlier steps are loaded before the kernel ahead has ended.
//
// A row's blocks leave their sums in `partial`, and the last one to arrive adds them up, in an order that follows from how
// many there are. How long a span is follows from the row's position, so that there are never more than SPLITS_MAX: the
// result depends on the position alone, neither on how much room there is nor on whether scores and probs are stored.
// ggml: ggml_flash_attn_ext (FLASH_ATTN_EXT), or MUL_MAT, SOFT_MAX, MUL_MAT.
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

// Which heads a block has: those numbered from `first` on of the G that read key head `kv`.
struct HeadGroup {
    int kv, first, count;
};
DEVICE HeadGroup head_group(const AttentionArgs& a) {
    const int all = a.heads / a.kv_heads, blocks = (all + HEADS_OF_BLOCK - 1) / HEADS_OF_BLOCK;
    const int kv = blockIdx.z / blocks, first = blockIdx.z % blocks * HEADS_OF_BLOCK;
    return HeadGroup{kv, first, min((int)HEADS_OF_BLOCK, all - first)};
}
DEVICE int head_of(const AttentionArgs& a, const HeadGroup& group, int i) {
    const int number = group.first + i;
    return a.kv_modulo ? group.kv + number * a.kv_heads : group.kv * (a.heads / a.kv_heads) + number;
}

// What a row's positions, or some of them, come to: for one head.
struct Softened {
    float highest, total;
};

// A warp's tiles: operands on their way, and what has become of those before. Lane 4g + q has head g.
template <int WIDTH>
struct FewWarp {
    typedef Few<WIDTH> F;
    Words4 q[F::UNITS], keys[F::TILES][2][F::UNITS];
    typename F::Piece values[F::TILES][4][F::PIECES];
    float sum[WIDTH / 8][4];  // rows g: of the upper halves of the probabilities; rows g + 8: of the lower halves
    float highest, total;     // total: of this lane's keys

    DEVICE void load_queries(const AttentionArgs& a, const HeadGroup& group, int t) {
        const int g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
        const half_t* from = (const half_t*)a.q + ((int64_t)t * a.heads + head_of(a, group, g)) * a.head_width;
        const Words4 zero = {};
#pragma unroll
        for (int u = 0; u < F::UNITS; u++) {
            const int column = 8 * (pair + 4 * u);
            q[u] = g < group.count && column < a.head_width ? *(const Words4*)(from + column) : zero;
        }
    }

    // Keys g and 8 + g of each tile, of the positions begin <= s < end.
    DEVICE void load_keys(const AttentionArgs& a, const half_t* from, int64_t stride, int tile, int begin, int end) {
        const int g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < F::TILES; i++) {
            const int start = tile + FEW_WARPS * KEYS_OF_TILE * i;
            if (start + KEYS_OF_TILE <= begin || start >= end) continue;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int s = start + 8 * n + g;
                if (s < begin || s >= end) continue;
#pragma unroll
                for (int u = 0; u < F::UNITS; u++) {
                    const int column = 8 * (pair + 4 * u);
                    if (column < a.head_width) keys[i][n][u] = *(const Words4*)(from + s * stride + column);
                }
            }
        }
    }

    // Values 2q, 2q + 1, 8 + 2q and 9 + 2q of each tile, likewise.
    DEVICE void load_values(const AttentionArgs& a, const half_t* from, int64_t stride, int tile, int begin, int end) {
        const int g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < F::TILES; i++) {
            const int start = tile + FEW_WARPS * KEYS_OF_TILE * i;
            if (start + KEYS_OF_TILE <= begin || start >= end) continue;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int s = start + 2 * pair + n % 2 + n / 2 * 8;
                if (s < begin || s >= end) continue;
#pragma unroll
                for (int p = 0; p < F::PIECES; p++) {
                    const int column = F::COLUMNS * (8 * p + g);
                    if (column < a.head_width) values[i][n][p] = *(const typename F::Piece*)(from + s * stride + column);
                }
            }
        }
    }

    DEVICE void clear_keys() {
        const Words4 zero = {};
#pragma unroll
        for (int i = 0; i < 2 * F::TILES; i++)
#pragma unroll
            for (int u = 0; u < F::UNITS; u++) keys[i / 2][i % 2][u] = zero;
    }
    DEVICE void clear_values() {
        const typename F::Piece zero = {};
#pragma unroll
        for (int i = 0; i < 4 * F::TILES; i++)
#pragma unroll
            for (int p = 0; p < F::PIECES; p++) values[i / 4][i % 4][p] = zero;
    }

    // Keys 2q, 2q + 1, 8 + 2q and 9 + 2q of tile i.
    DEVICE void multiply(int i, float score[4]) const {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float d[4] = {};
#pragma unroll
            for (int u = 0; u < F::UNITS; u++)
#pragma unroll
                for (int part = 0; part < 4; part += 2) {
                    const uint32_t heads[4] = {q[u].v[part], 0, q[u].v[part + 1], 0};
                    mma_16816(d, heads, &keys[i][n][u].v[part]);
                }
            score[2 * n] = d[0];
            score[2 * n + 1] = d[1];
        }
    }

    // Scores become 2^15 times their probabilities; what was summed so far shrinks.
    DEVICE void soften(float (&score)[F::TILES][4]) {
        float higher = highest;
#pragma unroll
        for (int i = 0; i < 4 * F::TILES; i++) higher = fmaxf(higher, score[i / 4][i % 4]);
#pragma unroll
        for (int d = 1; d < 4; d *= 2) higher = fmaxf(higher, __shfl_xor_sync(FULL_WARP, higher, d));
        const float shrink = expf(highest - finite_or_zero(higher));
        highest = higher;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) sum[i / 4][i % 4] *= shrink;
#pragma unroll
        for (int i = 0; i < 4 * F::TILES; i++) {
            float& x = score[i / 4][i % 4];
            x = expf(x - finite_or_zero(higher));
            total += x;
            x *= PROB_UNIT;
        }
    }

    // Adds the values of tile i, weighted.
    DEVICE void add(int i, const float prob[4]) {
        uint32_t weights[4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float* p = prob + 2 * n;
            weights[2 * n] = two_halves_of(p[0], p[1]);
            weights[2 * n + 1] = two_halves_of(p[0] - rounded<half_t>(p[0]), p[1] - rounded<half_t>(p[1]));
        }
#pragma unroll
        for (int p = 0; p < F::PIECES; p++)
#pragma unroll
            for (int j = 0; j < F::COLUMNS; j++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++)
                    {
                    const uint32_t even = values[i][2 * n][p].v[j / 2], odd = values[i][2 * n + 1][p].v[j / 2];
                    b[n] = j % 2 ? both_high(even, odd) : both_low(even, odd);
                }
                mma_16816(sum[F::COLUMNS * p + j], weights, b);
            }
    }

    // Leaves what this warp's positions come to.
    DEVICE void leave(typename F::Memory& memory, int warp) {
        const int g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
        for (int d = 1; d < 4; d *= 2) total += __shfl_xor_sync(FULL_WARP, total, d);
        if (pair == 0) memory.highest[warp][g] = highest;
        if (pair == 0) memory.total[warp][g] = total;
#pragma unroll
        for (int p = 0; p < F::PIECES; p++)
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int j = 0; j < F::COLUMNS; j += 4) {
                    Float4 x;
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const float* d = sum[F::COLUMNS * p + j + c];
                        // An infinite value times a lower half of 0 is no number; the upper half's product says all.
                        x.v[c] = d[e] + (fabsf(d[e]) < INFINITY_F ? d[2 + e] : 0.0f);
                    }
                    *(Float4*)&memory.sum[warp][g][F::COLUMNS * (8 * p + 2 * pair + e) + j] = x;
                }
    }
};

// Stores four columns of a head's result: x are the sums of 2^15 times the weighted values.
DEVICE void store_context(const AttentionArgs& a, int row, int column, const float x[4], float total) {
    if (column >= a.head_width) return;
    uint32_t* out = (uint32_t*)((half_t*)a.out + (int64_t)row * a.head_width + column);
#pragma unroll
    for (int j = 0; j < 2; j++)
        out[j] = two_halves_of(x[2 * j] * (1.0f / PROB_UNIT) / total, x[2 * j + 1] * (1.0f / PROB_UNIT) / total);
}

// Adds up what so many warps of this block have left: four columns of one head.
template <int WIDTH>
DEVICE Softened merge_warps(const typename Few<WIDTH>::Memory& memory, int warps, int head, int column, float x[4]) {
    Softened all = {-INFINITY_F, 0.0f};
#pragma unroll
    for (int w = 0; w < FEW_WARPS; w++)
        if (w < warps) all.highest = fmaxf(all.highest, memory.highest[w][head]);
#pragma unroll
    for (int w = 0; w < FEW_WARPS; w++) {
        if (w >= warps) continue;
        const float share = expf(memory.highest[w][head] - finite_or_zero(all.highest));
        const Float4 part = *(const Float4*)&memory.sum[w][head][column];
        all.total += memory.total[w][head] * share;
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = fmaf(part.v[j], share, x[j]);
    }
    return all;
}

// Adds up what the blocks of a row have left: one head, by one warp; four columns from 4·(lane % LANES) on, in as many
// chains as lanes have the same columns, and a tree.
template <int WIDTH>
DEVICE Softened merge_splits(const float* partial, int splits, float* share, float x[4]) {
    enum { BESIDE = 32 / Few<WIDTH>::LANES, AT_ONCE = 8, HELD = SPLITS_MAX / 32 + 1 };
    const int lane = threadIdx.x % 32, stride = Few<WIDTH>::PARTIAL;
    float highest[HELD], total = 0.0f;
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        const int s = lane + 32 * n;
        highest[n] = s < splits ? load_fresh(partial + s * stride + WIDTH) : -INFINITY_F;
    }
    float top = highest[0];
#pragma unroll
    for (int n = 1; n < HELD; n++) top = fmaxf(top, highest[n]);
    top = warp_max(top);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        const int s = lane + 32 * n;
        if (s >= splits) continue;
        share[s] = expf(highest[n] - finite_or_zero(top));
        total += load_fresh(partial + s * stride + WIDTH + 1) * share[s];
    }
    __syncwarp();
#pragma unroll 1
    for (int s = lane / Few<WIDTH>::LANES; s < splits; s += BESIDE * AT_ONCE) {
        Float4 part[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (s + BESIDE * n < splits)
                part[n] = load_fresh4(partial + (s + BESIDE * n) * stride + 4 * (lane % Few<WIDTH>::LANES));
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (s + BESIDE * n < splits) x[j] = fmaf(part[n].v[j], share[s + BESIDE * n], x[j]);
    }
#pragma unroll
    for (int d = Few<WIDTH>::LANES; d < 32; d *= 2)
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] += __shfl_xor_sync(FULL_WARP, x[j], d);
    return Softened{top, warp_sum(total)};
}

template <int WIDTH>
DEVICE void attention_few(const AttentionArgs& a) {
    typedef Few<WIDTH> F;
    SHARED(typename F::Memory, memory);
    const int t = blockIdx.y, lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32);
    const int first = warp_uniform(*a.first), cached = first + a.rows, reach = SPLIT * SPLITS_MAX;
    const int span = SPLIT * ((first + t + reach) / reach);  // of the row at position first + t
    const Window w = window(a, first, t);
    const int end = a.scores ? cached : w.to, splits = max(1, (end + span - 1) / span);
    if ((int)blockIdx.x >= splits) return;
    const HeadGroup group = head_group(a);
    const int64_t stride = (int64_t)a.kv_heads * a.head_width;
    const half_t* k = (const half_t*)a.k + group.kv * a.head_width;
    const half_t* v = (const half_t*)a.v + group.kv * a.head_width;
    const int from = blockIdx.x * span, stop = min(from + span, end);

    // What the row does not see is 0, and counts as nothing: it may be no number.
    FewWarp<WIDTH> mine;
    mine.clear_keys();
    mine.clear_values();
    int tile = from + KEYS_OF_TILE * warp;
    mine.load_keys(a, k, stride, tile, 0, min(first, stop));
    mine.load_values(a, v, stride, tile, w.from, min(first, min(stop, w.to)));
    wait_for_last();
    mine.load_queries(a, group, t);
    mine.load_keys(a, k, stride, tile, first, stop);
    mine.load_values(a, v, stride, tile, max(first, w.from), min(stop, w.to));
    mine.highest = -INFINITY_F;
    mine.total = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) mine.sum[i / 4][i % 4] = 0.0f;
#pragma unroll 1
    for (; tile < stop; tile += F::STEP) {
        const int next = tile + F::STEP;
        float score[F::TILES][4];
#pragma unroll
        for (int i = 0; i < F::TILES; i++) {
            const int start = tile + FEW_WARPS * KEYS_OF_TILE * i;
#pragma unroll
            for (int e = 0; e < 4; e++) score[i][e] = -INFINITY_F;
            if (start >= stop) continue;
            float x[4];
            mine.multiply(i, x);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int s = start + 2 * (lane % 4) + e % 2 + e / 2 * 8, i_head = lane / 4;
                if (a.scores && i_head < group.count && s < cached)
                    a.scores[((int64_t)head_of(a, group, i_head) * a.rows + t) * cached + s] = x[e];
                if (w.from <= s && s < w.to) score[i][e] = x[e] * a.scale;
            }
        }
        mine.clear_keys();
        mine.load_keys(a, k, stride, next, 0, stop);
        mine.soften(score);
#pragma unroll
        for (int i = 0; i < F::TILES; i++)
            if (tile + FEW_WARPS * KEYS_OF_TILE * i < stop) mine.add(i, score[i]);
        mine.clear_values();
        mine.load_values(a, v, stride, next, w.from, min(stop, w.to));
    }
    const int warps = min((int)FEW_WARPS, max(1, (stop - from + KEYS_OF_TILE - 1) / KEYS_OF_TILE));  // that have a tile
    if (warp < warps) mine.leave(memory, warp);
    __syncthreads();

    int head = threadIdx.x / F::LANES, column = threadIdx.x % F::LANES * 4;
    float x[4] = {};
    Softened all = {-INFINITY_F, 0.0f};
    if (head < group.count) all = merge_warps<WIDTH>(memory, warps, head, column, x);
    if (splits > 1) {
        const int row = t * a.heads + head_of(a, group, 0);
        const auto sums_of = [&](int i) {
            return a.partial + ((int64_t)t * a.heads + head_of(a, group, i)) * a.splits * F::PARTIAL;
        };
        if (head < group.count) {
            float* partial = sums_of(head) + blockIdx.x * F::PARTIAL;
            const Float4 sums = {{x[0], x[1], x[2], x[3]}};
            *(Float4*)(partial + column) = sums;
            if (column == 0) partial[WIDTH] = all.highest;
            if (column == 0) partial[WIDTH + 1] = all.total;
        }
        if (!is_last(a.arrived + row, splits)) return;
        head = warp;
        column = lane % F::LANES * 4;
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = 0.0f;
        const int merged = max(1, (w.to + span - 1) / span);  // the others have seen nothing
        if (head < group.count) all = merge_splits<WIDTH>(sums_of(head), merged, memory.share[head], x);
    }
    if (w.to <= w.from) all.total = 1.0f;  // a row that sees nothing is 0
    if (head < group.count) store_context(a, t * a.heads + head_of(a, group, head), column, x, all.total);
    if (!a.probs) return;
    // This block's scores were written before its warps were merged, those of others before it knew to be the last.
    if (head < group.count && column == 0) {
        memory.top[head] = all.highest;
        memory.whole[head] = all.total;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < group.count; i++)
        store_probs<32 * FEW_WARPS>(a, head_of(a, group, i), t, w.from, w.to, cached, memory.top[i], memory.whole[i]);
}

#define ATTENTION_FEW(width) KERNEL_AHEAD(attention_few_##width, AttentionArgs, 256, 1, attention_few<width>)
ATTENTION_FEW(32)
ATTENTION_FEW(64)
ATTENTION_FEW(128)
