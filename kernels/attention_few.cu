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
#include "attention_sums.cuh"

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

// What a block has: some heads at row t, and positions from <= s < stop, of which it sees from w.from on to w.to.
struct FewPart {
    HeadGroup group;
    Window w;
    const half_t *k, *v;  // (S, K, E) from its key head on
    int64_t stride;       // K·E
    int t, cached, from, stop;
};

// A warp's tiles: operands on their way, and what has become of those before. Lane 4g + q has head g.
template <int WIDTH>
struct FewWarp {
    typedef Few<WIDTH> F;
    Words4 q[F::UNITS], keys[F::TILES][2][F::UNITS];
    typename F::Piece values[F::TILES][4][F::PIECES];
    float sum[WIDTH / 8][4];  // rows g: of the upper halves of the probabilities; rows g + 8: of the lower halves
    float highest, total;     // total: of this lane's keys

    // Heads beyond those of the block have the last one's: their sums are left alone.
    DEVICE void load_queries(const AttentionArgs& a, const FewPart& part) {
        const int g = min((int)threadIdx.x % 32 / 4, part.group.count - 1), columns = 8 * (threadIdx.x % 4);
        const half_t* from = (const half_t*)a.q + (part.t * a.heads + head_of(a, part.group, g)) * a.head_width + columns;
#pragma unroll
        for (int u = 0; u < F::UNITS; u++)
            if (columns + 32 * u < a.head_width) q[u] = *(const Words4*)(from + 32 * u);
    }

    // Keys g and 8 + g of each tile, of the positions begin <= s < end.
    DEVICE void load_keys(const AttentionArgs& a, const FewPart& part, int tile, int begin, int end) {
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
                    if (column < a.head_width) keys[i][n][u] = *(const Words4*)(part.k + s * part.stride + column);
                }
            }
        }
    }

    // Values 2q, 2q + 1, 8 + 2q and 9 + 2q of each tile, likewise, that the row sees.
    DEVICE void load_values(const AttentionArgs& a, const FewPart& part, int tile, int begin, int end) {
        begin = max(begin, part.w.from);
        end = min(end, part.w.to);
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
                    if (column < a.head_width)
                        values[i][n][p] = *(const typename F::Piece*)(part.v + s * part.stride + column);
                }
            }
        }
    }

    DEVICE void clear_queries() {
        const Words4 zero = {};
#pragma unroll
        for (int u = 0; u < F::UNITS; u++) q[u] = zero;
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

    // Keys 2q, 2q + 1, 8 + 2q and 9 + 2q of tile i: four chains.
    DEVICE void multiply(int i, float score[4]) const {
        float d[2][2][4] = {};
#pragma unroll
        for (int u = 0; u < F::UNITS; u++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const uint32_t heads[4] = {q[u].v[2 * part], 0, q[u].v[2 * part + 1], 0};
#pragma unroll
                for (int n = 0; n < 2; n++) mma_16816(d[n][part], heads, &keys[i][n][u].v[2 * part]);
            }
#pragma unroll
        for (int e = 0; e < 4; e++) score[e] = d[e / 2][0][e % 2] + d[e / 2][1][e % 2];
    }

    // Scores become 2^15 times their probabilities; what was summed so far shrinks.
    template <bool FIRST>
    DEVICE void soften(float (&score)[F::TILES][4]) {
        float higher = FIRST ? -INFINITY_F : highest;
#pragma unroll
        for (int i = 0; i < 4 * F::TILES; i++) higher = fmaxf(higher, score[i / 4][i % 4]);
#pragma unroll
        for (int d = 1; d < 4; d *= 2) higher = fmaxf(higher, __shfl_xor_sync(FULL_WARP, higher, d));
        if (FIRST) {
            total = 0.0f;
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) sum[i / 4][i % 4] = 0.0f;
        } else {
            const float shrink = expf(highest - finite_or_zero(higher));
            total *= shrink;
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) sum[i / 4][i % 4] *= shrink;
        }
        highest = higher;
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
                for (int n = 0; n < 2; n++) {
                    const uint32_t even = values[i][2 * n][p].v[j / 2], odd = values[i][2 * n + 1][p].v[j / 2];
                    b[n] = j % 2 ? both_high(even, odd) : both_low(even, odd);
                }
                mma_16816(sum[F::COLUMNS * p + j], weights, b);
            }
    }

    // Takes the tiles that are here, and asks for the next ones.
    template <bool FIRST>
    DEVICE void take(const AttentionArgs& a, const FewPart& part, int tile) {
        const int next = tile + F::STEP;
        float score[F::TILES][4];
#pragma unroll
        for (int i = 0; i < F::TILES; i++) {
            const int start = tile + FEW_WARPS * KEYS_OF_TILE * i;
#pragma unroll
            for (int e = 0; e < 4; e++) score[i][e] = -INFINITY_F;
            if (i > 0 && start >= part.stop) continue;
            float x[4];
            multiply(i, x);
            if (a.scores) store_scores(a, part, start, x);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int s = start + 2 * (threadIdx.x % 4) + e % 2 + e / 2 * 8;
                if (part.w.from <= s && s < part.w.to) score[i][e] = x[e] * a.scale;
            }
        }
        if (next < part.stop) {
            clear_keys();
            load_keys(a, part, next, 0, part.stop);
        }
        soften<FIRST>(score);
#pragma unroll
        for (int i = 0; i < F::TILES; i++)
            if (i == 0 || tile + FEW_WARPS * KEYS_OF_TILE * i < part.stop) add(i, score[i]);
        if (next < part.stop) {
            clear_values();
            load_values(a, part, next, 0, part.stop);
        }
    }
    DEVICE void store_scores(const AttentionArgs& a, const FewPart& part, int start, const float x[4]) const {
        const int i = threadIdx.x % 32 / 4;
        if (i >= part.group.count) return;
        float* to = a.scores + ((int64_t)head_of(a, part.group, i) * a.rows + part.t) * part.cached;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int s = start + 2 * (threadIdx.x % 4) + e % 2 + e / 2 * 8;
            if (s < part.cached) to[s] = x[e];
        }
    }

    // Leaves what this warp's positions come to.
    DEVICE void leave(typename F::Memory& memory, int warp) {
        const int g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
        for (int d = 1; d < 4; d *= 2) total += __shfl_xor_sync(FULL_WARP, total, d);
        if (pair == 0) memory.highest[warp][g] = highest;
        if (pair == 0) memory.total[warp][g] = total;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < WIDTH / 4; i++) largest = fmaxf(largest, fabsf(sum[i / 2][i % 2]));
        // An infinite value times a lower half of 0 is no number; the upper half's product says all.
        if (!(largest < INFINITY_F))
#pragma unroll
            for (int i = 0; i < WIDTH / 4; i++)
                if (!(fabsf(sum[i / 2][i % 2]) < INFINITY_F)) sum[i / 2][2 + i % 2] = 0.0f;
#pragma unroll
        for (int p = 0; p < F::PIECES; p++)
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int j = 0; j < F::COLUMNS; j += 4) {
                    Float4 x;
#pragma unroll
                    for (int c = 0; c < 4; c++) x.v[c] = sum[F::COLUMNS * p + j + c][e] + sum[F::COLUMNS * p + j + c][2 + e];
                    *(Float4*)&memory.sum[warp][g][F::COLUMNS * (8 * p + 2 * pair + e) + j] = x;
                }
    }
};

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
    const int64_t at = group.kv * a.head_width;
    const int from = blockIdx.x * span, stop = min(from + span, end);
    const FewPart part = {group, w, (const half_t*)a.k + at, (const half_t*)a.v + at, (int64_t)a.kv_heads * a.head_width,
                          t, cached, from, stop};

    // What the row does not see is 0, and counts as nothing: it may be no number.
    FewWarp<WIDTH> mine;
    mine.clear_keys();
    mine.clear_values();
    mine.clear_queries();
    int tile = from + KEYS_OF_TILE * warp;
    mine.load_keys(a, part, tile, 0, min(first, stop));
    mine.load_values(a, part, tile, 0, min(first, stop));
    wait_for_last();
    mine.load_keys(a, part, tile, first, stop);
    mine.load_values(a, part, tile, first, stop);
    mine.load_queries(a, part);
    const int warps = min((int)FEW_WARPS, max(1, (stop - from + KEYS_OF_TILE - 1) / KEYS_OF_TILE));  // that have a tile
    if (warp < warps) {
        mine.template take<true>(a, part, tile);
#pragma unroll 1
        for (tile += F::STEP; tile < stop; tile += F::STEP) mine.template take<false>(a, part, tile);
        mine.leave(memory, warp);
    }
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
