// Matrix product for many token rows, exact: out[t, o] = Σ_i x[t, i]·w[o, i] in f32 throughout, without tensor cores:
// linear_split.cu has them where they take f32 operands in parts.
//
// Launch: grid (ceil(O / 64), ceil(T / 64), weights), 256·GROUPS threads; a block computes a 64 x 64 tile of out in steps
// of 32 columns, which its groups of 256 threads take by turns, a thread 4 x 4 of the tile. Half a step lies in shared
// memory, transposed, while the next half is on its way to registers. Accumulates in f32: 8 products in one chain, the
// chains of a step added up, and the steps with their rounding errors kept (Kahan, CACM 8:1, 1965), so that the error is
// that of 8 + 4 roundings whatever I is.
// ggml: ggml_mul_mat (MUL_MAT); llama.cpp rounds x to the weight's vec_dot_type first.
#include "linear.cuh"

enum { DEPTH = 32, HALF = 16, CHAIN = 8, PAD = 4, GROUP = 256 };

struct LinearTiles {
    alignas(16) float x[HALF][TILE + PAD];  // transposed: a thread's four rows lie side by side
    alignas(16) float w[HALF][TILE + PAD];
};

template <int GROUPS>
union LinearTileMemory {
    LinearTiles in[2][GROUPS];  // by turns
    ProductTile out;
};

// Eight columns of one row of x or of w, on their way to shared memory.
template <class W>
struct TilePiece {
    bool is_w, exists;
    int row, depth;
    const float* x;
    const uint8_t* w;
    float value[8];

    DEVICE TilePiece(const LinearArgs& a, const LinearPart& part, int t0, int o0) {
        const int thread = threadIdx.x % GROUP;
        is_w = thread >= GROUP / 2;
        row = thread % TILE;
        depth = thread / TILE % 2 * 8;
        exists = is_w ? o0 + row < part.outputs : t0 + row < a.rows;
        x = (const float*)a.x + (exists && !is_w ? (int64_t)(t0 + row) * a.columns : 0);
        w = part.weight + (exists && is_w ? (int64_t)(o0 + row) * part.row_bytes : 0);
    }
    DEVICE void load(int base, int columns) {
        const int i = base + depth;
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] = 0.0f;
        if (!exists || i >= columns) return;
        if (is_w) W::decode8(w, i, value);
        else load8(x + i, value);
    }
    DEVICE void put(LinearTiles& to) const {
        float(*tile)[TILE + PAD] = is_w ? to.w : to.x;
#pragma unroll
        for (int j = 0; j < 8; j++) tile[depth + j][row] = value[j];
    }
};

// Adds half a step: two chains of products.
DEVICE void add_half(const LinearTiles& tiles, int tx, int ty, float (&step)[4][4]) {
#pragma unroll
    for (int first = 0; first < HALF; first += CHAIN) {
        float chain[4][4] = {};
#pragma unroll
        for (int k = first; k < first + CHAIN; k++) {
            const Float4 xs = *(const Float4*)&tiles.x[k][4 * ty], ws = *(const Float4*)&tiles.w[k][4 * tx];
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < 4; c++) chain[r][c] = fmaf(xs.v[r], ws.v[c], chain[r][c]);
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) step[r][c] += chain[r][c];
    }
}

template <class W, int GROUPS>
DEVICE void linear_tile(const LinearArgs& a) {
    SHARED(LinearTileMemory<GROUPS>, memory);
    const LinearPart& part = a.parts[blockIdx.z];
    const int t0 = blockIdx.y * TILE, o0 = blockIdx.x * TILE;
    if (o0 >= part.outputs) return;  // another weight has more
    const int group = warp_uniform(threadIdx.x / GROUP), thread = threadIdx.x % GROUP;
    const int tx = thread % 16, ty = thread / 16;  // rows t0 + 4·ty .., outputs o0 + 4·tx ..

    TilePiece<W> piece(a, part, t0, o0);
    float sum[4][4] = {}, lost[4][4] = {};
    piece.load(group * DEPTH, a.columns);
#pragma unroll 1
    for (int base = group * DEPTH; base - group * DEPTH < a.columns; base += GROUPS * DEPTH) {
        float step[4][4] = {};
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            LinearTiles& tiles = memory.in[turn][group];
            piece.put(tiles);
            __syncthreads();
            piece.load(turn == 0 ? base + HALF : base + GROUPS * DEPTH, a.columns);
            add_half(tiles, tx, ty, step);
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float next = step[r][c] - lost[r][c], total = sum[r][c] + next;
                lost[r][c] = (total - sum[r][c]) - next;
                sum[r][c] = total;
            }
    }
#pragma unroll
    for (int turn = 0; turn < GROUPS; turn++) {
        __syncthreads();
        if (group != turn) continue;
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float& out = memory.out[4 * ty + r][4 * tx + c];
                out = turn == 0 ? sum[r][c] : out + sum[r][c];
            }
    }
    __syncthreads();
    store_tile<float>(a, part, memory.out, t0, o0);
}

#define LINEAR_TILE(format, suffix)                                                        \
    KERNEL_SIZED(linear_tile_##suffix, LinearArgs, GROUP, 2, linear_tile<format, 1>)        \
    KERNEL_SIZED(linear_tile2_##suffix, LinearArgs, 2 * GROUP, 1, linear_tile<format, 2>)
FOR_EACH_FORMAT(LINEAR_TILE)
