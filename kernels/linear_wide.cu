// Matrix product for many token rows, fastest: out[t, o] = Σ_i x[t, i]·w[o, i] on tensor cores, of f16 weights; those of
// other formats are decoded before, once (unpack.cu).
//
// Operands are f16, accumulation f32, as in linear_mma.cu, the plain kernel for this. Launch: grid (ceil(O / 32·WO),
// ceil(T / 16·M·WT), weights), 256 threads, WIDE_BYTES of dynamic shared memory; a block computes a tile of 16·M·WT rows
// and 32·WO outputs in steps of 32·GROUPS columns, a warp 16·M x 32 of it. With two GROUPS every second run of 32 columns
// is summed by other warps, and the two sums are added: for tiles that are too few to fill the GPU. As many steps as
// shared memory holds are under way; rows lie in units of 16 bytes whose places are exchanged so that no bank is met
// twice. ggml: ggml_mul_mat (MUL_MAT).
#include "linear.cuh"
#include "mma.cuh"

#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ < 800
enum { WIDE_BYTES = 48 << 10, WIDE_BLOCKS = 1 };
#else
enum { WIDE_BYTES = 96 << 10, WIDE_BLOCKS = 2 };
#endif
// Rows of a tile that go out at once.
enum { WIDE_THREADS = 256, OUT_ROWS = 64 };

template <int WT, int WO, int GROUPS, int M>
struct Wide {
    enum {
        ROWS = 16 * M,  // of a warp
        T = ROWS * WT,
        O = 32 * WO,
        DEPTH = 32 * GROUPS,
        UNITS = DEPTH / 8,
        STAGES = WIDE_BYTES / ((T + O) * DEPTH * 2),
    };
    union Memory {
        alignas(16) half_t in[STAGES][T + O][DEPTH];  // rows of x, then of w
        alignas(16) float out[OUT_ROWS][O + 4];
    };
    // Where unit `unit` of a row lies.
    static DEVICE int place(int row, int unit) { return 8 * (UNITS == 8 ? unit ^ (row & 7) : unit ^ (row >> 1 & 3)); }
};

// What a thread brings to shared memory in every step: 16 bytes of some rows of x and of w.
template <class Shape>
struct WideCopies {
    enum { COUNT = (Shape::T + Shape::O) * Shape::UNITS / WIDE_THREADS, BETWEEN = WIDE_THREADS / Shape::UNITS };
    const half_t* from[COUNT];  // of step 0, or of anything where there is no such row
    bool exists[COUNT];
    int place, column;

    // Rows `BETWEEN` apart have their units in the same places.
    DEVICE WideCopies(const LinearArgs& a, const LinearPart& part, int t0, int o0) {
        const int row0 = threadIdx.x / Shape::UNITS, unit = threadIdx.x % Shape::UNITS;
        static_assert(BETWEEN % 8 == 0, "the same places");
        column = 8 * unit;
        place = row0 * Shape::DEPTH + Shape::place(row0, unit);
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const int row = row0 + n * BETWEEN;
            const bool is_x = row < Shape::T;
            const int at = is_x ? t0 + row : o0 + row - Shape::T;
            exists[n] = at < (is_x ? a.rows : part.outputs);
            from[n] = (const half_t*)(is_x ? a.x : part.weight) + (exists[n] ? (int64_t)at * a.columns : 0) + column;
        }
    }

    // Brings the columns of the next step; what lies beyond the matrices becomes 0.
    DEVICE void bring(half_t* stage, int columns) {
        const bool inside = column < columns;
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            async_copy_or_zero(stage + place + n * (BETWEEN * Shape::DEPTH), from[n], exists[n] && inside);
            from[n] += inside ? Shape::DEPTH : 0;
        }
        column += Shape::DEPTH;
    }
};

// One step: a warp's 16·M x 32 tile, 32 columns deep from unit `unit` on.
template <class Shape, int M>
DEVICE void wide_step(const half_t (&in)[Shape::T + Shape::O][Shape::DEPTH], int warp_t, int warp_o, int unit,
                      float sum[M][4][4]) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        uint32_t x[M][4], w[2][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            const int row = warp_t + 16 * m + lane % 8 + matrix % 2 * 8;
            load_matrices(x[m], &in[row][Shape::place(row, unit + k + matrix / 2)]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int row = Shape::T + warp_o + 16 * n + lane % 8 + matrix / 2 * 8;
            load_matrices(w[n], &in[row][Shape::place(row, unit + k + matrix % 2)]);
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) mma_16816(sum[m][n], x[m], &w[n / 2][n % 2 * 2]);
    }
}

template <int WT, int WO, int GROUPS, int M>
DEVICE void linear_wide(const LinearArgs& a) {
    typedef Wide<WT, WO, GROUPS, M> Shape;
    DYNAMIC(typename Shape::Memory, memory);
    const LinearPart& part = a.parts[blockIdx.z];
    const int t0 = blockIdx.y * Shape::T, o0 = blockIdx.x * Shape::O;
    if (o0 >= part.outputs) return;  // another weight has more
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int group = warp / (WT * WO), warp_t = warp % (WT * WO) / WO * Shape::ROWS, warp_o = warp % WO * 32;
    const int steps = (a.columns + Shape::DEPTH - 1) / Shape::DEPTH, stages = Shape::STAGES;

    float sum[M][4][4] = {};
    WideCopies<Shape> copies(a, part, t0, o0);
    int to = 0, now = 0;
#pragma unroll 1
    for (int step = 1 - stages; step < steps; step++) {
        // Step `step` has arrived when only those after it are on their way.
        if (step >= 0) async_wait<Shape::STAGES - 2>();
        __syncthreads();
        if (step + stages - 1 < steps) copies.bring(&memory.in[to][0][0], a.columns);
        async_group();
        to = to + 1 < stages ? to + 1 : 0;
        if (step < 0) continue;
        wide_step<Shape, M>(memory.in[now], warp_t, warp_o, 4 * group, sum);
        now = now + 1 < stages ? now + 1 : 0;
    }
    async_wait<0>();
#pragma unroll 1
    for (int row0 = 0; row0 < Shape::T; row0 += OUT_ROWS) {
#pragma unroll
        for (int turn = 0; turn < GROUPS; turn++) {
            __syncthreads();
            if (group != turn || warp_t / OUT_ROWS * OUT_ROWS != row0) continue;
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int row = warp_t - row0 + 16 * m + g + e / 2 * 8;
                        float& out = memory.out[row][warp_o + 8 * n + 2 * q + e % 2];
                        out = turn == 0 ? sum[m][n][e] : out + sum[m][n][e];
                    }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < OUT_ROWS * Shape::O / 8; i += WIDE_THREADS) {
            const int row = i / (Shape::O / 8), column = i % (Shape::O / 8) * 8, t = t0 + row0 + row;
            float product[8];
            if (t >= a.rows || o0 + column >= part.outputs) continue;
            EightOperands with;
            with.fetch(a, part, t, o0 + column);
            load8(&memory.out[row][column], product);
            store_eight(a, part, t, o0 + column, product, with);
        }
    }
}

// Tiles of 64 x 64, 128 x 64 and 128 x 128.
KERNEL_SIZED(linear_wide_64, LinearArgs, WIDE_THREADS, WIDE_BLOCKS, linear_wide<2, 2, 2, 2>)
KERNEL_SIZED(linear_wide_128, LinearArgs, WIDE_THREADS, WIDE_BLOCKS, linear_wide<4, 2, 1, 2>)
KERNEL_SIZED(linear_wide_256, LinearArgs, WIDE_THREADS, WIDE_BLOCKS, linear_wide<2, 4, 1, 4>)
