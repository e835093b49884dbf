// Matrix product for many token rows, fast: out[t, o] = Σ_i x[t, i]·w[o, i] on tensor cores.
//
// Operands are f16 (x as it is stored, w decoded and rounded to f16), accumulation f32 in the tensor core.
// Launch: grid (ceil(O / 64), ceil(T / 64)), 128 threads; a block computes a 64 x 64 tile of out in steps of
// 32 columns, a warp 32 x 32 of it as 2 x 4 fragments of mma.m16n8k16. While one step is computed from one
// half of shared memory, the next is on its way in registers. ggml: ggml_mul_mat (MUL_MAT).
#include "linear.cuh"

enum { MMA_TILE = 64, MMA_DEPTH = 32, MMA_PAD = 8 };  // 80-byte rows: fragment loads meet no bank twice

struct MmaTiles {
    alignas(16) half_t x[2][MMA_TILE][MMA_DEPTH + MMA_PAD];
    alignas(16) half_t w[2][MMA_TILE][MMA_DEPTH + MMA_PAD];
};

// d += a·b for fragments of 16 x 16 and 16 x 8 (PTX ISA, mma.m16n8k16): lane 4g + q holds
//   a: (g, 2q..), (g + 8, 2q..), (g, 2q + 8..), (g + 8, 2q + 8..)   b: (2q.., g), (2q + 8.., g), two halves each
//   d: (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1)
DEVICE void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) {
#ifdef CUDA_ON_HOST
    cushim::mma_16816(d, a, b);
#elif __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else  // Turing has it with half the depth only
#pragma unroll
    for (int k = 0; k < 2; k++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

// Eight weights as halves.
template <class W>
struct Decode8Half {
    static DEVICE Half8 get(const uint8_t* row, int i) {
        float w[8];
        W::decode8(row, i, w);
        Half8 h;
#pragma unroll
        for (int j = 0; j < 8; j++) h.v[j] = to_half(w[j]);
        return h;
    }
};
template <>
struct Decode8Half<F16> {
    static DEVICE Half8 get(const uint8_t* row, int i) { return *(const Half8*)((const half_t*)row + i); }
};

DEVICE uint32_t two_halves(const half_t* p) { return *(const uint32_t*)p; }

// One step: the warp's 32 x 32 tile, two fragments deep.
DEVICE void mma_step(const MmaTiles& tiles, int buffer, int warp_t, int warp_o, int g, int q, float sum[2][4][4]) {
#pragma unroll
    for (int k = 0; k < MMA_DEPTH; k += 16) {
        uint32_t xa[2][4], wb[4][2];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int part = 0; part < 4; part++)
                xa[m][part] = two_halves(&tiles.x[buffer][warp_t + 16 * m + g + part % 2 * 8][k + 2 * q + part / 2 * 8]);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int part = 0; part < 2; part++)
                wb[n][part] = two_halves(&tiles.w[buffer][warp_o + 8 * n + g][k + 2 * q + part * 8]);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) mma_16816(sum[m][n], xa[m], wb[n]);
    }
}

template <class W>
DEVICE void linear_mma(const LinearArgs& a) {
    SHARED(MmaTiles, tiles);
    const int t0 = blockIdx.y * MMA_TILE, o0 = blockIdx.x * MMA_TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int warp_t = warp / 2 * 32, warp_o = warp % 2 * 32;
    // Loading: a thread brings 8 columns of rows r and r + 32 of each tile.
    const int r = threadIdx.x / 4, depth = threadIdx.x % 4 * 8;
    const Half8 zero = {};
    Half8 xv[2], wv[2];

    const auto fetch = [&](int base) {
        const int i = base + depth;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const int t = t0 + r + 32 * s, o = o0 + r + 32 * s;
            const half_t* x = (const half_t*)a.x + (int64_t)t * a.columns;
            const uint8_t* row = a.weight + (int64_t)o * a.row_bytes;
            xv[s] = t < a.rows && i < a.columns ? *(const Half8*)(x + i) : zero;
            wv[s] = o < a.outputs && i < a.columns ? Decode8Half<W>::get(row, i) : zero;
        }
    };
    const auto put = [&](int buffer) {
#pragma unroll
        for (int s = 0; s < 2; s++) {
            *(Half8*)&tiles.x[buffer][r + 32 * s][depth] = xv[s];
            *(Half8*)&tiles.w[buffer][r + 32 * s][depth] = wv[s];
        }
    };

    float sum[2][4][4] = {};
    const int steps = (a.columns + MMA_DEPTH - 1) / MMA_DEPTH;
#pragma unroll 1
    for (int step = 0; step <= steps; step++) {
        if (step < steps) fetch(step * MMA_DEPTH);
        if (step > 0) mma_step(tiles, (step - 1) % 2, warp_t, warp_o, g, q, sum);
        if (step < steps) put(step % 2);
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int t = t0 + warp_t + 16 * m + g + part / 2 * 8, o = o0 + warp_o + 8 * n + 2 * q + part % 2;
                if (t < a.rows && o < a.outputs) store_output<half_t>(a, t, o, sum[m][n][part]);
            }
}

#define LINEAR_MMA(format, suffix) KERNEL(linear_mma_##suffix, LinearArgs, linear_mma<format>)
FOR_EACH_FORMAT(LINEAR_MMA)
