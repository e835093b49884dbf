// Matrix product for few token rows, fast: out[t, o] = Σ_i x[t, i]·w[o, i] on tensor cores, each weight read once.
//
// Operands are f16 (x as it is stored, w decoded and rounded to f16), accumulation f32, as in linear_mma.cu; but
// the weights go from memory to the registers of the tensor core with no stop between (lanes.cuh).
// Launch: grid (at most ceil(O / 16), ceil(T / (8·TILES)), weights), 32·warps threads, warps at most 12, and dynamic shared memory
// for the warps' sums and the normed row. A block computes
// every gridDim.x-th tile of 16 outputs of up to 8·TILES rows; its warps share the columns: chunk c goes to warp
// c % warps. The warps' sums are added up in order, so a result depends neither on T nor on TILES nor on the grid.
// linear_row.cu computes the same in scalar arithmetic.
//
// What follows is computed at once, and stored beside the products, with the bits of the kernels that do it alone:
// bias and residual sum; rotary embedding, for which a block takes both columns of eight pairs; the gated
// activation, for which it takes eight outputs of gate and of up. A single row may be normed first, by every block
// for itself. ggml: ggml_mul_mat (MUL_MAT), and what follows it.
#include "few.cuh"
#include "lanes.cuh"

// Columns of a warp's sums of a tile: its token rows.
template <int TILES, bool ONE>
struct FewColumns {
    enum { COUNT = ONE ? 1 : 8 * TILES };
};
// The sums of all warps, twice, lie in dynamic shared memory; behind them, where there is ONE row, the row, and the parts
// of a norm's weight that the warps need first.

template <class X, int N>
struct alignas(sizeof(X) * N) FewColumnsOf {
    X v[N];
};

// The one row, in shared memory: each warp brings the columns of its own chunks, which no other reads.
template <int CHUNK>
struct OneRow {
    enum { EACH = CHUNK / 32 };
    half_t* x;      // (I,), at `padded`
    float* weight;  // (warps, CHUNK) of the norm's weight: what each warp needs first

    DEVICE float* own_weight() const { return weight + threadIdx.x / 32 * CHUNK + EACH * (threadIdx.x % 32); }
    // On its way before x is there.
    DEVICE void fetch_weight(const LinearArgs& a, int chunk) const {
        const int i = chunk * CHUNK + EACH * (threadIdx.x % 32);
#pragma unroll
        for (int j = 0; j < EACH; j += 4)
            if (i + j < a.columns) async_copy(own_weight() + j, a.norm_weight + i + j);
        async_group();
    }
    DEVICE void copy(const LinearArgs& a, int warp, int warps, int chunks) const {
        const int at = 8 * (threadIdx.x % 32);
        for (int chunk = warp; chunk < chunks; chunk += warps) {
            const int i = chunk * CHUNK + at;
            if (at < CHUNK && i < a.columns) async_copy(x + padded(i), (const half_t*)a.x + i);
        }
        async_group();
        async_wait<0>();
    }
    DEVICE void norm(const LinearArgs& a, int warp, int warps, int chunks) const {
        const bool stores = blockIdx.x == 0 && blockIdx.z == 0;
        float scale = 0.0f;
        for (int chunk = warp; chunk < chunks; chunk += warps) {
            typedef FewColumnsOf<half_t, EACH> Columns;
            const int i = chunk * CHUNK + EACH * (threadIdx.x % 32);
            Columns v = {}, y;
            if (i < a.columns) v = *(const Columns*)((const half_t*)a.x + i);
            if (chunk == warp) scale = few_scale((const half_t*)a.x, a.columns, a.eps);
            else fetch_weight(a, chunk);
            async_wait<0>();
            if (i >= a.columns) continue;
#pragma unroll
            for (int j = 0; j < EACH; j++) y.v[j] = to_half(to_float(v.v[j]) * scale * own_weight()[j]);
            *(Columns*)(x + padded(i)) = y;
            if (stores) *(Columns*)((half_t*)a.normed + i) = y;
        }
    }
};

// One chunk: the products of a warp's sixteen rows of weights and of all token rows.
template <class W, int TILES, bool ONE>
DEVICE void few_chunk(const Lanes<W> (&rows)[2], const half_t* x, const int (&from)[TILES], int base, int columns, int q,
                      float (&sum)[2][TILES][4]) {
#pragma unroll Lanes<W>::UNROLL
    for (int j = 0; j < Lanes<W>::CHUNK / 32; j++) {
        const int i = base + Lanes<W>::column(q, j);
        const bool inside = Lanes<W>::CHUNK == 256 || i < columns;  // blocks of 256 end with the row
        Words4 xs[TILES];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const Words4 zero = {};
            xs[n] = inside ? *(const Words4*)(x + (ONE ? padded(i) : from[n] + i)) : zero;
        }
        uint32_t first[4] = {}, second[4] = {};
        if (inside) {
            rows[0].group(q, j, first);
            rows[1].group(q, j, second);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t w[4] = {first[2 * k], second[2 * k], first[2 * k + 1], second[2 * k + 1]};
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_16816(sum[k][n], w, xs[n].v + 2 * k);
        }
    }
}

// Where a warp is in its work: tiles of outputs, and of each every so many chunks.
struct FewPlace {
    int tile, chunk;
};

template <class W, int TILES, bool ONE>
DEVICE void linear_few(const LinearArgs& a) {
    enum { COLUMNS = FewColumns<TILES, ONE>::COUNT };
    DYNAMIC(FewSums<COLUMNS>, first_sums);
    FewSums<COLUMNS>* const sums = &first_sums;
    const LinearPart& part = a.parts[blockIdx.z];
    const bool gate_up = part.pairs == GATE_UP;
    const int tiles = (part.outputs + (gate_up ? 7 : 15)) / (gate_up ? 8 : FEW_OUTPUTS);
    if ((int)blockIdx.x >= tiles) return;  // another weight has more
    const int warp = warp_uniform(threadIdx.x / 32), warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, q = lane % 4, t0 = blockIdx.y * (8 * TILES);
    const int chunks = (a.columns + Lanes<W>::CHUNK - 1) / Lanes<W>::CHUNK;

    Lanes<W> rows[2];
    FewPlace next = {(int)blockIdx.x, warp};
    const uint8_t* const weight[2] = {part.weight, gate_up ? a.parts[1].weight : part.weight};
    const int step = few_step(a, part);
    // Loads what lies at `next`, and goes on by one.
    const auto load = [&] {
        if (next.tile >= tiles) return;
        const int first = few_output(a, part, next.tile, g), last = part.outputs - 1;
        const int o[2] = {min(first, last), min(first + step, last)};
#pragma unroll
        for (int side = 0; side < 2; side++)
            rows[side].load(weight[side] + o[side] * part.row_bytes, next.chunk * Lanes<W>::CHUNK, q, a.columns);
        next.chunk += warps;
        if (next.chunk < chunks) return;
        next.chunk = warp;
        next.tile += gridDim.x;
    };
    // The first weights, and all that is constant, are on their way before the kernel ahead has ended.
    load();
    OneRow<Lanes<W>::CHUNK> row;
    row.x = (half_t*)(sums + 2 * warps);
    row.weight = (float*)(row.x + (padded(a.columns) + 7) / 8 * 8);
    if (ONE && a.normed) row.fetch_weight(a, warp);
    FewOperands with = {};
    const auto fetch = [&](int tile, bool computed) {
        const FewItem<COLUMNS> item(a, part, tile, t0, threadIdx.x);
        fetch_operands(a, part, item.t, item.o, computed, with);
    };
    fetch(blockIdx.x, false);
    prefetch(a.next, a.next_bytes);
    wait_for_last();
    fetch(blockIdx.x, true);

    const half_t* const x = ONE ? row.x : (const half_t*)a.x;
    int from[TILES] = {};
    if constexpr (ONE) {
        if (a.normed) row.norm(a, warp, warps, chunks);
        else row.copy(a, warp, warps, chunks);
        __syncwarp();
    } else {
#pragma unroll
        for (int n = 0; n < TILES; n++)  // rows beyond the last are computed and not stored
            from[n] = min(t0 + 8 * n + g, a.rows - 1) * a.columns;
    }

    int turn = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        float sum[2][TILES][4] = {};
#pragma unroll 1
        for (int chunk = warp; chunk < chunks; chunk += warps) {
            few_chunk<W, TILES, ONE>(rows, x, from, chunk * Lanes<W>::CHUNK, a.columns, q, sum);
            load();
        }
        FewSums<COLUMNS>* const own = sums + turn * warps;  // by turns, so that one barrier is enough
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + 2 * q + e % 2;
                if (column < COLUMNS) own[warp][g + e / 2 * 8][column] = sum[0][n][e] + sum[1][n][e];
            }
        __syncthreads();
        store_few<COLUMNS, 4>(a, part, own, tile, t0, with);
        if (tile + (int)gridDim.x >= tiles) return;
        fetch(tile + gridDim.x, false);
        fetch(tile + gridDim.x, true);
    }
}

// One row, up to 8 rows a block, up to 16.
#define LINEAR_FEW(format, suffix)                                                                                        \
    KERNEL_AHEAD(linear_few1_##suffix, LinearArgs, Lanes<format>::THREADS, Lanes<format>::BLOCKS, linear_few<format, 1, true>)  \
    KERNEL_AHEAD(linear_few8_##suffix, LinearArgs, Lanes<format>::THREADS, 1, linear_few<format, 1, false>)                    \
    KERNEL_AHEAD(linear_few16_##suffix, LinearArgs, Lanes<format>::THREADS, 1, linear_few<format, 2, false>)
FOR_EACH_FORMAT(LINEAR_FEW)
