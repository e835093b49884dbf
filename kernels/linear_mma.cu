// Matrix product for many token rows, fast: out[t, o] = Σ_i x[t, i]·w[o, i] on tensor cores.
//
// Operands are f16 (x as it is stored, w decoded and rounded to f16), accumulation f32 in the tensor core.
// Launch: grid (ceil(O / 64), ceil(T / 64), weights), 128 threads; a block computes a 64 x 64 tile of out in steps
// of 32 columns, a warp 32 x 32 of it as 2 x 4 fragments of mma.m16n8k16. Three steps are on their way into
// shared memory while one is computed: x and f16 weights by asynchronous copies, others decoded by the threads.
// ggml: ggml_mul_mat (MUL_MAT).
#include "linear.cuh"
#include "mma.cuh"

enum { MMA_DEPTH = 32, MMA_PAD = 8, STAGES = 4 };  // 80-byte rows: no bank is met twice

struct MmaTiles {
    alignas(16) half_t x[STAGES][TILE][MMA_DEPTH + MMA_PAD];
    alignas(16) half_t w[STAGES][TILE][MMA_DEPTH + MMA_PAD];
};

union MmaMemory {
    MmaTiles in;
    ProductTile out;
};

// Brings eight weights to shared memory as halves.
template <class W>
struct Bring {
    static DEVICE void eight(half_t* to, const uint8_t* row, int i) {
        float w[8];
        W::decode8(row, i, w);
        Half8 h;
#pragma unroll
        for (int j = 0; j < 8; j++) h.v[j] = to_half(w[j]);
        *(Half8*)to = h;
    }
};
template <>
struct Bring<F16> {
    static DEVICE void eight(half_t* to, const uint8_t* row, int i) { async_copy(to, (const half_t*)row + i); }
};

DEVICE uint32_t two_halves(const half_t* p) { return *(const uint32_t*)p; }

// One step: the warp's 32 x 32 tile, two fragments deep.
DEVICE void mma_step(const MmaTiles& tiles, int stage, int warp_t, int warp_o, int g, int q, float sum[2][4][4]) {
#pragma unroll
    for (int k = 0; k < MMA_DEPTH; k += 16) {
        uint32_t xa[2][4], wb[4][2];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int part = 0; part < 4; part++)
                xa[m][part] = two_halves(&tiles.x[stage][warp_t + 16 * m + g + part % 2 * 8][k + 2 * q + part / 2 * 8]);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int part = 0; part < 2; part++)
                wb[n][part] = two_halves(&tiles.w[stage][warp_o + 8 * n + g][k + 2 * q + part * 8]);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) mma_16816(sum[m][n], xa[m], wb[n]);
    }
}

// Brings columns base .. base + 31 of the block's rows of x and w; a thread 8 columns of rows r and r + 32 of each.
// What lies beyond the matrices becomes 0.
template <class W>
DEVICE void bring_stage(const LinearArgs& a, const LinearPart& part, MmaTiles& tiles, int stage, int base, int t0, int o0) {
    const int r = threadIdx.x / 4, depth = threadIdx.x % 4 * 8, i = base + depth;
    const Half8 zero = {};
#pragma unroll
    for (int s = 0; s < 64; s += 32) {
        const int t = t0 + r + s, o = o0 + r + s;
        half_t *x = &tiles.x[stage][r + s][depth], *w = &tiles.w[stage][r + s][depth];
        if (t < a.rows && i < a.columns) async_copy(x, (const half_t*)a.x + (int64_t)t * a.columns + i);
        else *(Half8*)x = zero;
        if (o < part.outputs && i < a.columns) Bring<W>::eight(w, part.weight + (int64_t)o * part.row_bytes, i);
        else *(Half8*)w = zero;
    }
}

template <class W>
DEVICE void linear_mma(const LinearArgs& a) {
    SHARED(MmaMemory, memory);
    MmaTiles& tiles = memory.in;
    const LinearPart& part = a.parts[blockIdx.z];
    const int t0 = blockIdx.y * TILE, o0 = blockIdx.x * TILE;
    if (o0 >= part.outputs) return;  // another weight has more
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int warp_t = warp / 2 * 32, warp_o = warp % 2 * 32;
    const int steps = (a.columns + MMA_DEPTH - 1) / MMA_DEPTH;

    float sum[2][4][4] = {};
#pragma unroll 1
    for (int step = 1 - STAGES; step < steps; step++) {
        // Step `step` has arrived when only the two after it are on their way.
        if (step >= 0) async_wait<STAGES - 2>();
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps) bring_stage<W>(a, part, tiles, next % STAGES, next * MMA_DEPTH, t0, o0);
        async_group();
        if (step >= 0) mma_step(tiles, step % STAGES, warp_t, warp_o, g, q, sum);
    }
    async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                memory.out[warp_t + 16 * m + g + e / 2 * 8][warp_o + 8 * n + 2 * q + e % 2] = sum[m][n][e];
    __syncthreads();
    store_tile<half_t>(a, part, memory.out, t0, o0);
}

#define LINEAR_MMA(format, suffix) KERNEL(linear_mma_##suffix, LinearArgs, linear_mma<format>)
FOR_EACH_FORMAT(LINEAR_MMA)
