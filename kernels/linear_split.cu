// Matrix product for many token rows, exact, on tensor cores: out[t, o] = Σ_i x[t, i]·w[o, i] with f32 operands.
//
// A tensor core multiplies operands of 11 significant bits (TF32) and adds the products up in f32. An f32 value has 24: it
// is the sum of three such parts, high, middle and low, exactly. A weight of 16 bits is one part; any other is split as
// well, and products of parts below 2^-33 of the whole are left out (Ootomo and Yokota, arXiv 2203.03341, have two parts).
//
// Launch: grid (ceil(O / 64), ceil(T / 64), weights), 128·GROUPS threads, and dynamic shared memory: `SplitMemory`. A block
// computes a 64 x 64 tile of out in steps of 32 columns, which its groups of four warps take by turns; a warp has 32 x 32
// of the tile. While a step is multiplied the next one is on its way: x to shared memory, w to registers, from which it is
// decoded. The products of a step are one chain, which begins with what the sum lost so far (Kahan, CACM 8:1, 1965), so
// that the error is that of a chain of 32 columns whatever I is; then the groups are added up in their order.
// linear_tile.cu computes the same without tensor cores. ggml: ggml_mul_mat (MUL_MAT); llama.cpp rounds x to the weight's
// vec_dot_type first.
#include "linear.cuh"
#include "mma.cuh"

// A pitch of 40 words: what half a warp reads at once, two words a lane of four rows, lies in different banks.
enum { SPLIT_STEP = 32, SPLIT_PITCH = 40, SPLIT_GROUP = 128, SPLIT_PARTS = 3 };

// Columns of x and of w that one group multiplies.
struct SplitStep {
    alignas(16) float x[TILE][SPLIT_PITCH];
    alignas(16) float w[TILE][SPLIT_PITCH];
};

template <int GROUPS>
union SplitMemory {
    SplitStep in[2][GROUPS];                      // by turns
    alignas(16) float out[GROUPS][TILE][TILE + 8];
};

// Eight weights of a row on their way, and in how many parts they are multiplied.
template <class W>
struct SplitWeights {
    enum { PARTS = SPLIT_PARTS };
    float value[8];
    DEVICE void load(const uint8_t* row, int i, bool exists) {
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] = 0.0f;
        if (exists) W::decode8(row, i, value);
    }
    DEVICE void put(float* to) const { store8(to, value); }
};

// Weights of 16 bits: decoded when they have arrived.
struct SplitHalves {
    enum { PARTS = 1 };
    Half8 raw;
    DEVICE void load(const uint8_t* row, int i, bool exists) {
        const Half8 zero = {};
        raw = exists ? *(const Half8*)((const half_t*)row + i) : zero;
    }
};
template <>
struct SplitWeights<F16> : SplitHalves {
    DEVICE void put(float* to) const {
        float value[8];
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] = to_float(raw.v[j]);
        store8(to, value);
    }
};
template <>
struct SplitWeights<BF16> : SplitHalves {
    DEVICE void put(float* to) const {
        float value[8];
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] = bf16_to_float(raw.v[j].bits);
        store8(to, value);
    }
};

// What one thread brings of each step: four columns of x of every 16th row, and eight of w of every 32nd.
template <class W>
struct SplitLoads {
    enum {
        X_LANES = SPLIT_STEP / 4,
        W_LANES = SPLIT_STEP / 8,
        X_APART = SPLIT_GROUP / X_LANES,
        W_APART = SPLIT_GROUP / W_LANES,
        XS = TILE / X_APART,
        WS = TILE / W_APART
    };
    const float* x;
    const uint8_t* w;
    int rows, outputs;  // from the first on
    SplitWeights<W> weights[WS];
    DEVICE SplitLoads(const LinearArgs& a, const LinearPart& part, int t0, int o0, int thread) {
        const int t = t0 + thread / X_LANES, o = o0 + thread / W_LANES;
        rows = a.rows - t;
        outputs = part.outputs - o;
        x = (const float*)a.x + (rows > 0 ? (int64_t)t * a.columns : 0);
        w = part.weight + (outputs > 0 ? o * part.row_bytes : 0);
    }
    // Zeros for what there is not: rows, outputs and columns beyond the last.
    DEVICE void fetch(SplitStep& to, int base, int columns, int64_t row_bytes, int thread) {
#pragma unroll
        for (int n = 0; n < WS; n++) {
            const int i = base + thread % W_LANES * 8;
            weights[n].load(w + n * W_APART * row_bytes, i, i < columns && n * W_APART < outputs);
        }
#pragma unroll
        for (int n = 0; n < XS; n++) {
            const int i = base + thread % X_LANES * 4;
            const bool exists = i < columns && n * X_APART < rows;
            const float* from = x + (exists ? (int64_t)n * X_APART * columns + i : 0);
            async_copy_or_zero(&to.x[thread / X_LANES + n * X_APART][thread % X_LANES * 4], from, exists);
        }
        async_group();
    }
    DEVICE void put(SplitStep& to, int thread) const {
#pragma unroll
        for (int n = 0; n < WS; n++) weights[n].put(&to.w[thread / W_LANES + n * W_APART][thread % W_LANES * 8]);
    }
};

// The parts of a value, the first PARTS of them, each cut off after 11 bits; what is no finite number has one.
template <int PARTS>
DEVICE void split_parts(float x, uint32_t (&part)[PARTS]) {
    const uint32_t kept = 0xffffe000u;
    const bool whole = !(fabsf(x) < INFINITY_F);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const uint32_t bits = (uint32_t)__float_as_int(x);
        part[p] = whole ? (p == 0 ? bits : 0) : bits & kept;
        x -= __int_as_float((int)part[p]);
    }
}

// A warp's part of the tile: two times 16 rows, four times 8 outputs. Lane 4g + q has rows g and g + 8 of the former and
// outputs 2q and 2q + 1 of the latter.
struct SplitSums {
    float v[2][4][4];
};

// Adds the products of a step, eight columns at once: of them a lane has columns 2q and 2q + 1.
template <int PARTS>
DEVICE void add_split(const SplitStep& step, int t, int o, int g, int q, SplitSums& chain) {
    struct alignas(8) Two {
        float v[2];
    };
#pragma unroll 1
    for (int k = 2 * q; k < SPLIT_STEP; k += 8) {
        uint32_t x[2][4][SPLIT_PARTS], w[4][2][PARTS];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const Two two = *(const Two*)&step.x[t + 16 * m + 8 * side + g][k];
                split_parts<SPLIT_PARTS>(two.v[0], x[m][side]);
                split_parts<SPLIT_PARTS>(two.v[1], x[m][2 + side]);
            }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const Two two = *(const Two*)&step.w[o + 8 * n + g][k];
#pragma unroll
            for (int side = 0; side < 2; side++) {
                if (PARTS == 1) w[n][side][0] = (uint32_t)__float_as_int(two.v[side]);
                else split_parts<PARTS>(two.v[side], w[n][side]);
            }
        }
        // The smallest products first.
#pragma unroll
        for (int level = SPLIT_PARTS - 1; level >= 0; level--)
#pragma unroll
            for (int p = 0; p < PARTS && p <= level; p++)
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        const int of = level - p;
                        const uint32_t a[4] = {x[m][0][of], x[m][1][of], x[m][2][of], x[m][3][of]};
                        const uint32_t b[2] = {w[n][0][p], w[n][1][p]};
                        mma_1688(chain.v[m][n], a, b);
                    }
    }
}

// Adds up what the groups have of each product, and stores it: neighbouring threads neighbouring columns.
template <int GROUPS>
DEVICE void store_groups(const LinearArgs& a, const LinearPart& part, const SplitMemory<GROUPS>& memory, int t0, int o0) {
    enum { AT_ONCE = 4, THREADS = GROUPS * SPLIT_GROUP };  // operands under way
    const int first = first_of(a, part);
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE * TILE; i += AT_ONCE * THREADS) {
        const int c = i % TILE;
        float other[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int t = t0 + (i + n * THREADS) / TILE;
            other[n] = t < a.rows && o0 + c < part.outputs ? operand_of<float>(part, t, o0 + c) : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int r = (i + n * THREADS) / TILE;
            float product = memory.out[0][r][c];
#pragma unroll
            for (int g = 1; g < GROUPS; g++) product += memory.out[g][r][c];
            if (t0 + r < a.rows && o0 + c < part.outputs) store_output_with<float>(a, part, first, t0 + r, o0 + c, product, other[n]);
        }
    }
}

template <class W, int GROUPS>
DEVICE void linear_split(const LinearArgs& a) {
    DYNAMIC(SplitMemory<GROUPS>, memory);
    const LinearPart& part = a.parts[blockIdx.z];
    const int t0 = blockIdx.y * TILE, o0 = blockIdx.x * TILE;
    if (o0 >= part.outputs) return;  // another weight has more
    const int group = warp_uniform(threadIdx.x / SPLIT_GROUP), thread = threadIdx.x % SPLIT_GROUP;
    const int warp = warp_uniform(thread / 32), g = thread % 32 / 4, q = thread % 4;
    const int t = warp / 2 * 32, o = warp % 2 * 32;  // of the warp within the tile

    SplitLoads<W> loads(a, part, t0, o0, thread);
    SplitSums sum = {}, chain = {};
    int turn = 0;
    loads.fetch(memory.in[0][group], group * SPLIT_STEP, a.columns, part.row_bytes, thread);
    loads.put(memory.in[0][group], thread);
    async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int base = 0; base < a.columns; base += GROUPS * SPLIT_STEP, turn ^= 1) {
        SplitStep& next = memory.in[turn ^ 1][group];
        loads.fetch(next, base + (GROUPS + group) * SPLIT_STEP, a.columns, part.row_bytes, thread);
        add_split<SplitWeights<W>::PARTS>(memory.in[turn][group], t, o, g, q, chain);
        loads.put(next, thread);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float &all = sum.v[m][n][e], &last = chain.v[m][n][e];
                    const float total = all + last;
                    last -= total - all;
                    all = total;
                }
        async_wait<0>();
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                memory.out[group][t + 16 * m + 8 * (e / 2) + g][o + 8 * n + 2 * q + e % 2] = sum.v[m][n][e] + chain.v[m][n][e];
    __syncthreads();
    store_groups<GROUPS>(a, part, memory, t0, o0);
}

#define LINEAR_SPLIT(format, suffix) \
    KERNEL_SIZED(linear_split_##suffix, LinearArgs, 2 * SPLIT_GROUP, 2, linear_split<format, 2>)
#if defined(CUDA_ON_HOST) || __CUDA_ARCH__ >= 800  // Turing multiplies no TF32
FOR_EACH_FORMAT(LINEAR_SPLIT)
#endif
