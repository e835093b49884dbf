// Matrix product for many token rows, exact: out[t, o] = Σ_i x[t, i]·w[o, i] in f32 throughout.
//
// Launch: grid (ceil(O / 64), ceil(T / 64), weights), 256 threads; a block computes a 64 x 64 tile of out in steps of
// 32 columns through shared memory, a thread 4 x 4 of it. Accumulates in f32: 8 products in one chain, the chains
// of a step added up, and the steps with their rounding errors kept (Kahan, CACM 8:1, 1965), so that the error is
// that of 8 + 4 roundings whatever I is.
// ggml: ggml_mul_mat (MUL_MAT); llama.cpp rounds x to the weight's vec_dot_type first.
#include "linear.cuh"

enum { DEPTH = 32, CHAIN = 8, PAD = 4 };

struct LinearTiles {
    alignas(16) float x[DEPTH][TILE + PAD];  // transposed: a thread's four rows lie side by side
    alignas(16) float w[DEPTH][TILE + PAD];
};

union LinearTileMemory {
    LinearTiles in;
    ProductTile out;
};

DEVICE void put_column(float tile[DEPTH][TILE + PAD], int row, int depth, const float v[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) tile[depth + j][row] = v[j];
}

template <class W>
DEVICE void linear_tile(const LinearArgs& a) {
    SHARED(LinearTileMemory, memory);
    LinearTiles& tiles = memory.in;
    const LinearPart& part = a.parts[blockIdx.z];
    const int t0 = blockIdx.y * TILE, o0 = blockIdx.x * TILE;
    if (o0 >= part.outputs) return;  // another weight has more
    // Loading: a thread brings 8 columns of one row of x and of one row of w.
    const int load_row = threadIdx.x / 4, load_depth = threadIdx.x % 4 * 8;
    const int load_t = t0 + load_row, load_o = o0 + load_row;
    const float* x = (const float*)a.x + (int64_t)load_t * a.columns;
    const uint8_t* row = part.weight + (int64_t)load_o * part.row_bytes;
    // Computing: rows t0 + 4·ty .., outputs o0 + 4·tx ..
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

    float sum[4][4] = {}, lost[4][4] = {};
    for (int base = 0; base < a.columns; base += DEPTH) {
        const int i = base + load_depth;
        float xv[8] = {}, wv[8] = {};
        if (load_t < a.rows && i < a.columns) load8(x + i, xv);
        if (load_o < part.outputs && i < a.columns) W::decode8(row, i, wv);
        put_column(tiles.x, load_row, load_depth, xv);
        put_column(tiles.w, load_row, load_depth, wv);
        __syncthreads();
        float step[4][4] = {};
#pragma unroll
        for (int first = 0; first < DEPTH; first += CHAIN) {
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
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float next = step[r][c] - lost[r][c], total = sum[r][c] + next;
                lost[r][c] = (total - sum[r][c]) - next;
                sum[r][c] = total;
            }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) memory.out[4 * ty + r][4 * tx + c] = sum[r][c];
    __syncthreads();
    store_tile<float>(a, part, memory.out, t0, o0);
}

#define LINEAR_TILE(format, suffix) KERNEL(linear_tile_##suffix, LinearArgs, linear_tile<format>)
FOR_EACH_FORMAT(LINEAR_TILE)
