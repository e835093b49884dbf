// Attention for many token rows on tensor cores: as attention.cu, which is the plain kernel for this, of f16 values.
//
// Launch: grid (ceil(T / 64), H), 256 threads, BYTES of dynamic shared memory; a block has 64 token rows of one head. Keys
// and values come in chunks of KEYS positions, which its KEY_GROUPS groups of four warps take in turn, so that a row's chunks
// are not one long chain: each group has all the rows, 16 a warp, and brings its own chunks through shared memory, one
// ahead. Scores are products of f16 operands with sums in f32, softmax is online as in attention.cu (a row lies in four
// lanes); the first group merges what all have summed, in their order. Probabilities go to the tensor cores as the sum of
// two halves, of 2^15·p: what is left out is below 2^-40, so that the result is that of products in f32.
// The result of a row does not depend on whether scores and probs are stored. ggml: ggml_flash_attn_ext
// (FLASH_ATTN_EXT), or MUL_MAT, SOFT_MAX, MUL_MAT.
#include "attention.cuh"
#include "mma.cuh"

enum { QUERIES = 64, GROUP_THREADS = 2 * QUERIES, KEY_GROUPS = 2, MMA_THREADS = KEY_GROUPS * GROUP_THREADS };

// A row's softmax so far.
struct RowState {
    float highest, total;
};

// What a group has summed of its chunks: a thread's part of rows g and g + 8 of a warp's sixteen.
template <int WIDTH>
struct Summed {
    float sum[WIDTH / 8][4];  // of values, times 2^15·e^(score - highest)
    RowState state[2];
};

template <int WIDTH>
struct Flash {
    enum { KEYS = WIDTH == 128 ? 32 : 64, UNITS = WIDTH / 8, TILES = KEYS / 8 };
    struct Buffers {
        alignas(16) half_t k[2][KEYS][WIDTH];
        alignas(16) half_t v[2][KEYS][WIDTH];
    };
    // A group's sums, thread by thread.
    struct Left {
        Float4 sum[UNITS][GROUP_THREADS];
        RowState state[2][GROUP_THREADS];
    };
    struct Ends {
        Left left[KEY_GROUPS - 1];  // by the groups after the first
        RowState row[QUERIES];
    };
    union Memory {
        Buffers of[KEY_GROUPS];
        Ends ends;
    };
    // What the launch asks for: 64 KB at most, which is all that Turing has.
    enum { BYTES = KEY_GROUPS * (WIDTH == 32 ? 16 << 10 : 32 << 10) };
    static_assert(sizeof(Memory) == BYTES, "what calls/attention.rs asks for");
    // Units of 16 bytes exchange places so that no bank is met twice.
    static DEVICE int place(int row, int unit) { return 8 * (UNITS == 4 ? unit ^ (row >> 1 & 3) : unit ^ (row & 7)); }
};

// Brings a group the keys or the values of positions from chunk on; what does not exist becomes 0.
template <int WIDTH>
DEVICE void bring_keys(half_t (&to)[Flash<WIDTH>::KEYS][WIDTH], const half_t* from, int64_t stride, int chunk, int cached,
                       int width) {
    typedef Flash<WIDTH> F;
    const Half8 zero = {};
#pragma unroll
    for (int n = 0; n < F::KEYS * F::UNITS / GROUP_THREADS; n++) {
        const int u = threadIdx.x % GROUP_THREADS + n * GROUP_THREADS, row = u / F::UNITS, unit = u % F::UNITS;
        half_t* place = &to[row][F::place(row, unit)];
        if (chunk + row < cached && 8 * unit < width) async_copy(place, from + (chunk + row) * stride + 8 * unit);
        else *(Half8*)place = zero;
    }
}

// A row's queries as operands: rows g and g + 8 of the warp's sixteen.
template <int WIDTH>
DEVICE void load_queries(const AttentionArgs& a, int h, int t, uint32_t (&q)[WIDTH / 16][4]) {
    const int g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int row = t + g + part % 2 * 8, column = 16 * k + 2 * pair + part / 2 * 8;
            const half_t* from = (const half_t*)a.q + ((int64_t)row * a.heads + h) * a.head_width + column;
            q[k][part] = row < a.rows && column < a.head_width ? *(const uint32_t*)from : 0;
        }
}

template <int WIDTH>
DEVICE void score_chunk(const half_t (&keys)[Flash<WIDTH>::KEYS][WIDTH], const uint32_t (&q)[WIDTH / 16][4],
                        float (&score)[Flash<WIDTH>::TILES][4]) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
#pragma unroll
        for (int n = 0; n < Flash<WIDTH>::TILES; n += 2) {
            uint32_t b[4];
            const int row = 8 * n + lane % 8 + matrix / 2 * 8;
            load_matrices(b, &keys[row][Flash<WIDTH>::place(row, 2 * k + matrix % 2)]);
            mma_16816(score[n], q[k], b);
            mma_16816(score[n + 1], q[k], b + 2);
        }
}

// Scores of two rows become 2^15 times their probabilities; returns by how much what was summed so far shrinks.
template <int TILES>
DEVICE void soften(const AttentionArgs& a, int r, Window w, int chunk, float (&score)[TILES][4], RowState& state,
                   float& shrink) {
    const int pair = threadIdx.x % 4;
    float higher = state.highest;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int s = chunk + 8 * n + 2 * pair + e;
            float& x = score[n][2 * r + e];
            x = w.from <= s && s < w.to ? x * a.scale : -INFINITY_F;
            higher = fmaxf(higher, x);
        }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) higher = fmaxf(higher, __shfl_xor_sync(FULL_WARP, higher, d));
    shrink = expf(state.highest - finite_or_zero(higher));
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float& x = score[n][2 * r + e];
            x = x == -INFINITY_F ? 0.0f : expf(x - finite_or_zero(higher));
            total += x;
            x *= PROB_UNIT;
        }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) total += __shfl_xor_sync(FULL_WARP, total, d);
    state.total = state.total * shrink + total;
    state.highest = higher;
}

// Adds the values of a chunk, weighted: each probability as the sum of two halves.
template <int WIDTH>
DEVICE void add_chunk(const half_t (&values)[Flash<WIDTH>::KEYS][WIDTH], const float (&prob)[Flash<WIDTH>::TILES][4],
                      float (&sum)[WIDTH / 8][4]) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
    for (int k = 0; k < Flash<WIDTH>::TILES; k += 2) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const float* p = &prob[k + part / 2][part % 2 * 2];
            const float rounded_p[2] = {rounded<half_t>(p[0]), rounded<half_t>(p[1])};
            high[part] = two_halves_of(p[0], p[1]);
            low[part] = two_halves_of(p[0] - rounded_p[0], p[1] - rounded_p[1]);
        }
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {
            uint32_t b[4];
            const int row = 8 * k + lane % 8 + matrix % 2 * 8;
            load_matrices_transposed(b, &values[row][Flash<WIDTH>::place(row, n + matrix / 2)]);
            mma_16816(sum[n], high, b);
            mma_16816(sum[n + 1], high, b + 2);
            mma_16816(sum[n], low, b);
            mma_16816(sum[n + 1], low, b + 2);
        }
    }
}

// The same in scalar arithmetic, for chunks with values that are no finite numbers: what a row does not see is left out.
template <int WIDTH>
DEVICE void add_chunk_strange(const half_t (&values)[Flash<WIDTH>::KEYS][WIDTH], const float (&prob)[Flash<WIDTH>::TILES][4],
                              const Window (&w)[2], int chunk, float (&sum)[WIDTH / 8][4]) {
    const int lane = threadIdx.x % 32, pair = lane % 4;
#pragma unroll
    for (int k = 0; k < Flash<WIDTH>::TILES; k++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll 1
            for (int j = 0; j < 8; j++) {
                const float mine = j % 2 ? prob[k][2 * r + 1] : prob[k][2 * r];
                const float p = __shfl_sync(FULL_WARP, mine, lane - pair + j / 2);
                const int row = 8 * k + j, s = chunk + row;
                if (s < w[r].from || s >= w[r].to) continue;
#pragma unroll
                for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        sum[n][2 * r + e] =
                            fmaf(p, to_float(values[row][Flash<WIDTH>::place(row, n) + 2 * pair + e]), sum[n][2 * r + e]);
            }
}

// Whether a warp meets a value of the chunk that is no finite number.
template <int WIDTH>
DEVICE bool is_strange(const half_t (&values)[Flash<WIDTH>::KEYS][WIDTH]) {
    const uint32_t* words = (const uint32_t*)&values[0][0];
    bool strange = false;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < Flash<WIDTH>::KEYS * WIDTH / 2; i += 32)
        strange |= (words[i] & 0x7c00u) == 0x7c00u || (words[i] & 0x7c000000u) == 0x7c000000u;
    return __ballot_sync(FULL_WARP, strange) != 0;
}

// Adds a chunk to what a warp has summed; stores its scores where they are wanted.
template <int WIDTH>
DEVICE void take_chunk(const AttentionArgs& a, int h, int t, int cached, const Window (&w)[2], int chunk,
                       const half_t (&keys)[Flash<WIDTH>::KEYS][WIDTH], const half_t (&values)[Flash<WIDTH>::KEYS][WIDTH],
                       const uint32_t (&q)[WIDTH / 16][4], Summed<WIDTH>& mine) {
    typedef Flash<WIDTH> F;
    const int g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    float score[F::TILES][4] = {};
    score_chunk<WIDTH>(keys, q, score);
    if (a.scores) {
#pragma unroll
        for (int n = 0; n < F::TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = t + g + e / 2 * 8, s = chunk + 8 * n + 2 * pair + e % 2;
                if (row < a.rows && s < cached) a.scores[((int64_t)h * a.rows + row) * cached + s] = score[n][e];
            }
    }
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) soften<F::TILES>(a, r, w[r], chunk, score, mine.state[r], shrink[r]);
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) mine.sum[n][e] *= shrink[e / 2];
    // Where some row does not see all of the chunk, 0 times what is no number must not reach it.
    const bool whole = min(w[0].to, w[1].to) >= chunk + F::KEYS && max(w[0].from, w[1].from) <= chunk;
    if (__ballot_sync(FULL_WARP, !whole) != 0 && is_strange<WIDTH>(values))
        add_chunk_strange<WIDTH>(values, score, w, chunk, mine.sum);
    else add_chunk<WIDTH>(values, score, mine.sum);
}

// Leaves what this group has summed for the first.
template <int WIDTH>
DEVICE void leave_sums(const Summed<WIDTH>& mine, typename Flash<WIDTH>::Left& left) {
    const int i = threadIdx.x % GROUP_THREADS;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
        left.sum[n][i] = Float4{{mine.sum[n][0], mine.sum[n][1], mine.sum[n][2], mine.sum[n][3]}};
#pragma unroll
    for (int r = 0; r < 2; r++) left.state[r][i] = mine.state[r];
}

// Adds what the other groups have left to the sums of the first. One without a chunk has left a maximum of -infinity: its
// share is 0.
template <int WIDTH>
DEVICE void merge_groups(const typename Flash<WIDTH>::Left (&left)[KEY_GROUPS - 1], Summed<WIDTH>& mine) {
    const int i = threadIdx.x % GROUP_THREADS;
    float own[2], share[KEY_GROUPS - 1][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        RowState& state = mine.state[r];
        float highest = state.highest;
#pragma unroll
        for (int n = 0; n < KEY_GROUPS - 1; n++) highest = fmaxf(highest, left[n].state[r][i].highest);
        own[r] = expf(state.highest - finite_or_zero(highest));
        state.total *= own[r];
        state.highest = highest;
#pragma unroll
        for (int n = 0; n < KEY_GROUPS - 1; n++) {
            share[n][r] = expf(left[n].state[r][i].highest - finite_or_zero(highest));
            state.total = fmaf(left[n].state[r][i].total, share[n][r], state.total);
        }
    }
#pragma unroll
    for (int u = 0; u < WIDTH / 8; u++) {
#pragma unroll
        for (int e = 0; e < 4; e++) mine.sum[u][e] *= own[e / 2];
#pragma unroll
        for (int n = 0; n < KEY_GROUPS - 1; n++) {
            const Float4 other = left[n].sum[u][i];
#pragma unroll
            for (int e = 0; e < 4; e++) mine.sum[u][e] = fmaf(other.v[e], share[n][e / 2], mine.sum[u][e]);
        }
    }
}

// Stores the result of a warp's rows, and leaves their softmax for the probabilities.
template <int WIDTH>
DEVICE void store_rows(const AttentionArgs& a, int h, int t, const Window (&w)[2], const Summed<WIDTH>& all,
                       RowState* row_state) {
    const int g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = t + g + 8 * r;
        const float total = w[r].to <= w[r].from ? 1.0f : all.state[r].total;  // a row that sees nothing is 0
        if (pair == 0) row_state[g + 8 * r] = RowState{all.state[r].highest, total};
        if (row >= a.rows) continue;
        half_t* out = (half_t*)a.out + ((int64_t)row * a.heads + h) * a.head_width;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++)
            if (8 * n < a.head_width)
                *(uint32_t*)(out + 8 * n + 2 * pair) = two_halves_of(all.sum[n][2 * r] * (1.0f / PROB_UNIT) / total,
                                                                     all.sum[n][2 * r + 1] * (1.0f / PROB_UNIT) / total);
    }
}

template <int WIDTH>
DEVICE void attention_mma(const AttentionArgs& a) {
    typedef Flash<WIDTH> F;
    DYNAMIC(typename F::Memory, memory);
    const int h = blockIdx.y, t0 = (gridDim.x - 1 - blockIdx.x) * QUERIES;  // the longest first
    const int group = warp_uniform(threadIdx.x / GROUP_THREADS), row0 = warp_uniform(threadIdx.x % GROUP_THREADS / 32) * 16;
    const int first = *a.first, cached = first + a.rows, t = t0 + row0, g = threadIdx.x % 32 / 4;
    const int64_t stride = (int64_t)a.kv_heads * a.head_width;
    const int head = kv_head_of(a, h) * a.head_width;  // where it begins in a position's keys and values
    const Window w[2] = {window(a, first, t + g), window(a, first, t + g + 8)};
    const int end = a.scores ? cached : window(a, first, min(t0 + QUERIES, a.rows) - 1).to;
    const int warp_end = t >= a.rows ? 0 : a.scores ? cached : window(a, first, min(t + 16, a.rows) - 1).to;

    typename F::Buffers& buffers = memory.of[group];
    uint32_t q[WIDTH / 16][4];
    load_queries<WIDTH>(a, h, t, q);
    Summed<WIDTH> mine = {{}, {{-INFINITY_F, 0.0f}, {-INFINITY_F, 0.0f}}};
    // The groups' next chunks begin at `begin`; before the first there is nothing to take.
    enum { ALL_KEYS = KEY_GROUPS * F::KEYS };
#pragma unroll 1
    for (int begin = -ALL_KEYS, turn = 1; begin < end; begin += ALL_KEYS, turn ^= 1) {
        const int chunk = begin + group * F::KEYS, next = chunk + ALL_KEYS;
        async_wait<0>();
        __syncthreads();  // this turn's chunk has arrived, and the one before it has been read
        if (next < end) {
            bring_keys<WIDTH>(buffers.k[turn ^ 1], (const half_t*)a.k + head, stride, next, cached, a.head_width);
            bring_keys<WIDTH>(buffers.v[turn ^ 1], (const half_t*)a.v + head, stride, next, cached, a.head_width);
        }
        async_group();
        if (begin < 0 || chunk >= warp_end) continue;  // no row of this warp sees it
        take_chunk<WIDTH>(a, h, t, cached, w, chunk, buffers.k[turn], buffers.v[turn], q, mine);
    }

    __syncthreads();  // the buffers have been read
    if (group > 0) leave_sums<WIDTH>(mine, memory.ends.left[group - 1]);
    __syncthreads();
    if (group == 0) {
        merge_groups<WIDTH>(memory.ends.left, mine);
        store_rows<WIDTH>(a, h, t, w, mine, memory.ends.row + row0);
    }
    if (!a.probs) return;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < QUERIES && t0 + i < a.rows; i++) {
        const Window sees = window(a, first, t0 + i);
        const RowState& row = memory.ends.row[i];
        store_probs<MMA_THREADS>(a, h, t0 + i, sees.from, sees.to, cached, row.highest, row.total);
    }
}

KERNEL_SIZED(attention_mma_32, AttentionArgs, MMA_THREADS, 2, attention_mma<32>)
KERNEL_SIZED(attention_mma_64, AttentionArgs, MMA_THREADS, 1, attention_mma<64>)
KERNEL_SIZED(attention_mma_128, AttentionArgs, MMA_THREADS, 1, attention_mma<128>)
