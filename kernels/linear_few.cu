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
#include "activation.cuh"
#include "lanes.cuh"
#include "linear.cuh"
#include "rope.cuh"

enum { FEW_OUTPUTS = 16, FEW_WARPS = 12 };

// Columns of a warp's sums of a tile: its token rows.
template <int TILES, bool ONE>
struct FewColumns {
    enum { COUNT = ONE ? 1 : 8 * TILES };
};
// The sums of all warps, twice, lie in dynamic shared memory; behind them, where there is ONE row, the row, and the parts
// of a norm's weight that the warps need first.
template <int COLUMNS>
using FewSums = float[FEW_OUTPUTS][COLUMNS];

// Where column i of the one row lies: so that lanes whose columns are 128 bytes apart meet no bank twice.
DEVICE int padded(int i) { return i + i / 64 * 8; }

// Output `i` of the first eight of a tile; number i + 8 is `few_step` further on, where outputs go in pairs its partner.
DEVICE int few_output(const LinearArgs& a, const LinearPart& part, int tile, int i) {
    if (part.pairs == HALVES) {
        const uint32_t half_head = (uint32_t)a.head_width / 2, pair = 8 * tile, head = pair / half_head;
        return pair + head * half_head + i;
    }
    return part.pairs == GATE_UP ? 8 * tile + i : 16 * tile + (part.pairs == NEIGHBOURS ? 2 * i : i);
}
DEVICE int few_step(const LinearArgs& a, const LinearPart& part) {
    if (part.pairs == HALVES) return a.head_width / 2;
    return part.pairs == ALONE ? 8 : part.pairs == NEIGHBOURS ? 1 : 0;
}

// The RMS norm of a row by one warp: 1 / sqrt(mean(x²) + eps), the squares summed in f32, four chains a lane and a tree.
DEVICE float few_scale(const half_t* x, int columns, double eps) {
    enum { AT_ONCE = 8 };  // loads under way
    float chain[4] = {};
    for (int base = 8 * (threadIdx.x % 32); base < columns; base += 256 * AT_ONCE) {
        Half8 eight[AT_ONCE];
        const Half8 zero = {};
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) eight[n] = base + 256 * n < columns ? *(const Half8*)(x + base + 256 * n) : zero;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float v = to_float(eight[n].v[j]);
                chain[j % 4] = fmaf(v, v, chain[j % 4]);
            }
    }
    const float squares = warp_sum((chain[0] + chain[1]) + (chain[2] + chain[3]));
    return 1.0f / sqrtf(squares / columns + (float)eps);
}

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

// What a thread's outputs are put together with: fetched before the products are there.
struct FewOperands {
    float other[2], angle[2];
};

// The operands for row t and outputs o: those that are constant in a step, or those that other kernels compute.
DEVICE void fetch_operands(const LinearArgs& a, const LinearPart& part, int t, const int o[2], bool computed, FewOperands& to) {
    const int sides = part.pairs == ALONE ? 1 : 2;
    if (t >= a.rows || o[0] >= part.outputs) return;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const LinearPart& own = part.pairs == GATE_UP ? a.parts[side] : part;
        if (side < sides && own.follow == (computed ? RESIDUAL : BIAS)) to.other[side] = operand_of<half_t>(own, t, o[side]);
    }
    if (computed || (part.pairs != HALVES && part.pairs != NEIGHBOURS)) return;
    const int within = o[0] % a.head_width, pair = part.pairs == HALVES ? within : within / 2;
    const float* angle = a.angles + ((int64_t)(*a.first + t) * (a.head_width / 2) + pair) * 2;
    to.angle[0] = angle[0];
    to.angle[1] = angle[1];
}

// Stores two products that go together, and what is computed from both.
DEVICE void store_pair(const LinearArgs& a, const LinearPart& part, int t, const int o[2], const float product[2],
                       const FewOperands& with) {
    if (part.pairs == GATE_UP) {
        const float gate = store_values<half_t>(a.parts[0], t, o[0], product[0], with.other[0]);
        const float up = store_values<half_t>(a.parts[1], t, o[1], product[1], with.other[1]);
        const int64_t i = (int64_t)t * part.outputs + o[0];
        store((half_t*)part.turned + i, activate(gate, SILU) * up);
        return;
    }
    const float x = store_values<half_t>(part, t, o[0], product[0], with.other[0]);
    const float y = store_values<half_t>(part, t, o[1], product[1], with.other[1]);
    const Rotated z = rotate(x, y, with.angle[0], with.angle[1]);
    const float results[2] = {rounded<half_t>(z.a), rounded<half_t>(z.b)};
#pragma unroll
    for (int e = 0; e < 2; e++) {
        store((half_t*)part.turned + (int64_t)t * part.outputs + o[e], results[e]);
        append(a, part, t, o[e], results[e]);
    }
}

// Item `i` of a tile to be stored: which row and outputs.
template <int COLUMNS>
struct FewItem {
    int r, column, t, o[2];
    DEVICE FewItem(const LinearArgs& a, const LinearPart& part, int tile, int t0, int i) {
        const int bits = part.pairs == ALONE ? 4 : 3, step = few_step(a, part);  // of the number of outputs or pairs
        r = i & ((1 << bits) - 1);
        column = i >> bits;
        t = column < COLUMNS ? t0 + column : a.rows;
        const int first = few_output(a, part, tile, r % 8);
        o[0] = first + r / 8 * step;
        o[1] = first + step;
    }
};

// Adds up the warps' sums of one tile and stores the products. `with` has the operands of a thread's first item.
template <int COLUMNS>
DEVICE void store_few(const LinearArgs& a, const LinearPart& part, const FewSums<COLUMNS>* sums, int tile, int t0,
                      FewOperands& with) {
    const int warps = blockDim.x / 32, sides = part.pairs == ALONE ? 1 : 2;
    for (int i = threadIdx.x;; i += blockDim.x) {
        const FewItem<COLUMNS> item(a, part, tile, t0, i);
        if (item.t >= a.rows) return;  // and so are all after it
        float product[2] = {};
#pragma unroll
        for (int side = 0; side < 2; side++) {
            if (side >= sides) break;
#pragma unroll
            for (int w = 0; w < FEW_WARPS; w++)
                if (w < warps) product[side] += sums[w][item.r + 8 * side][item.column];
        }
        if (i != (int)threadIdx.x) {
            fetch_operands(a, part, item.t, item.o, false, with);
            fetch_operands(a, part, item.t, item.o, true, with);
        }
        if (item.o[0] >= part.outputs) continue;
        if (sides == 2) store_pair(a, part, item.t, item.o, product, with);
        else store_output_with<half_t>(a, part, item.t, item.o[0], product[0], with.other[0]);
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
        store_few<COLUMNS>(a, part, own, tile, t0, with);
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
