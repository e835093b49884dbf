// Matrix product for many token rows on Hopper: out[t, o] = Σ_i x[t, i]·w[o, i], of f16 weights (others: unpack.cu) on tensor
// cores that a warpgroup feeds from shared memory (wgmma), where the copy engine brings tiles of x and w (TMA).
//
// Operands are f16, accumulation f32, as in linear_mma.cu, the plain kernel for this; linear_wide.cu is for other GPUs.
// Launch: grid (ceil(O / N)·SPLIT, ceil(T / 64·GROUPS), weights), each in whole clusters of X·SPLIT x Y blocks, 128·GROUPS + 32
// threads, and `Shape::BYTES` of dynamic shared memory. A block computes 64·GROUPS token rows, 64 a warpgroup, of N outputs,
// in steps of 64 columns, STAGES of them under way; its last warp asks for them. X blocks of a cluster read the same rows of
// x and Y the same of w: each asks for its share, which comes to all of them. SPLIT blocks share the columns of a tile, one
// run each; their sums are added up in order, so that bits depend on the shape, which the host chooses. Gate and up may be
// multiplied at once, by clusters with Y = 2: one block's share of w is of gate, the other's of up, N/2 outputs of each, and
// silu(gate)·up is stored too, with the bits of glu.cu. ggml: ggml_mul_mat (MUL_MAT), and what follows it.
#include "activation.cuh"
#include "linear.cuh"
#include "warpgroup.cuh"

struct WarpgroupArgs {
    TensorMap x, w[3];
    LinearArgs linear;
    int constant;  // whether the weights are the model's own, which no kernel ahead has written
};

#ifdef HAS_WARPGROUPS

template <int GROUPS, int WIDTH, int STEPS_AHEAD, int X_BLOCKS, int Y_BLOCKS, int PARTS>
struct WarpgroupShape {
    enum {
        T = 64 * GROUPS,
        N = WIDTH,
        STAGES = STEPS_AHEAD,
        X = X_BLOCKS,
        Y = Y_BLOCKS,
        SPLIT = PARTS,
        CONSUMERS = WARPGROUP * GROUPS,
        THREADS = CONSUMERS + 32,
        X_SHARE = T / X,  // rows that a block asks for
        W_SHARE = N / Y,
        STEP_BYTES = (T + N) * TILE_ROW_BYTES,
        PITCH = N + 4,  // of a row of sums: no bank is met twice
        // What lies before the first tile, which begins at a multiple of 1024.
        HEAD = TILE_ALIGNMENT,
        BYTES = 2 * HEAD + STAGES * STEP_BYTES,
    };
    static_assert(T % X == 0 && N % Y == 0 && X_SHARE % 8 == 0 && W_SHARE % 8 == 0, "whole eights of rows");
    static_assert(T * PITCH * 4 <= STAGES * STEP_BYTES, "sums lie where tiles were");
};

// Where a block is: in its cluster, and in the product.
template <class Shape>
struct WarpgroupPlace {
    int x, y, part;  // number among those that share rows of x, of w, and the columns of a tile
    int t0, o0, width, first, steps;  // width: outputs of a tile, of each of its weights
    bool gate_up;
    DEVICE WarpgroupPlace(const LinearArgs& a) {
        part = blockIdx.x % Shape::SPLIT;
        const int tile = blockIdx.x / Shape::SPLIT;
        x = tile % Shape::X;
        y = blockIdx.y % Shape::Y;
        t0 = blockIdx.y * Shape::T;
        gate_up = Shape::Y == 2 && a.parts[blockIdx.z].pairs == GATE_UP;
        width = gate_up ? Shape::N / 2 : Shape::N;
        o0 = tile * width;
        const int all = (a.columns + TILE_COLUMNS - 1) / TILE_COLUMNS, each = (all + Shape::SPLIT - 1) / Shape::SPLIT;
        first = part * each;
        steps = max(0, min(each, all - first));
    }
    DEVICE static int rank(int x, int y, int part) { return part + Shape::SPLIT * (x + Shape::X * y); }
    // Bits of the blocks that share rows of x with this one, and of w.
    DEVICE int x_blocks() const {
        int blocks = 0;
#pragma unroll
        for (int i = 0; i < Shape::X; i++) blocks |= 1 << rank(i, y, part);
        return blocks;
    }
    DEVICE int w_blocks() const {
        int blocks = 0;
#pragma unroll
        for (int i = 0; i < Shape::Y; i++) blocks |= 1 << rank(x, i, part);
        return blocks;
    }
    // The n-th block that sends tiles to this one, of X + Y - 1.
    DEVICE int sender(int n) const {
        if (n < Shape::X) return rank(n, y, part);
        const int other = n - Shape::X;
        return rank(x, other < y ? other : other + 1, part);
    }
};

template <class Shape>
struct WarpgroupMemory {
    SharedBarrier* arrived;  // (STAGES,) what a step needs is here
    SharedBarrier* taken;    // (STAGES,) and has been multiplied, by all blocks that it came to
    half_t* tiles;           // (STAGES, T + N, 64): rows of x, then of w
    DEVICE WarpgroupMemory(uint8_t* memory) {
        arrived = (SharedBarrier*)memory;
        taken = arrived + Shape::STAGES;
        tiles = (half_t*)(memory + Shape::HEAD);
    }
    DEVICE half_t* x(int stage) const { return tiles + stage * (Shape::STEP_BYTES / 2); }
    DEVICE half_t* w(int stage) const { return x(stage) + Shape::T * TILE_COLUMNS; }
    DEVICE float* sums() const { return (float*)tiles; }  // (T, PITCH), when the last tile is multiplied
};

// Asks for what the steps need, by one thread: the weights before the kernel ahead has ended, if they are constant.
template <class Shape>
DEVICE void bring_steps(const WarpgroupArgs& args, const WarpgroupPlace<Shape>& place, const WarpgroupMemory<Shape>& memory) {
    const TensorMap& map = args.w[place.gate_up ? place.y : (int)blockIdx.z];
    const int o = place.o0 + (place.gate_up ? 0 : place.y * Shape::W_SHARE);
    const int x_blocks = place.x_blocks(), w_blocks = place.w_blocks();
    const auto bring_w = [&](int step, int stage) {
        memory.arrived[stage].expect(Shape::STEP_BYTES);
        bring_tile<(Shape::Y > 1)>(map, memory.w(stage) + place.y * Shape::W_SHARE * TILE_COLUMNS, memory.arrived[stage],
                   (place.first + step) * TILE_COLUMNS, o, w_blocks);
    };
    const int ahead = args.constant ? min(place.steps, (int)Shape::STAGES) : 0;
    for (int step = 0; step < ahead; step++) bring_w(step, step);
    wait_for_last();
    int stage = 0, parity = 1;
#pragma unroll 1
    for (int step = 0; step < place.steps; step++) {
        if (step >= ahead) {
            memory.taken[stage].wait(parity);
            bring_w(step, stage);
        }
        bring_tile<(Shape::X > 1)>(args.x, memory.x(stage) + place.x * Shape::X_SHARE * TILE_COLUMNS, memory.arrived[stage],
                   (place.first + step) * TILE_COLUMNS, place.t0 + place.x * Shape::X_SHARE, x_blocks);
        if (++stage == Shape::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// The products of a warpgroup, into shared memory.
template <class Shape>
DEVICE void multiply_steps(const WarpgroupPlace<Shape>& place, const WarpgroupMemory<Shape>& memory, int group, float (&sum)[Shape::N / 2]) {
    const int lane = threadIdx.x % 32;
    const int sender = lane < Shape::X + Shape::Y - 1 ? place.sender(lane) : -1;
#pragma unroll
    for (int i = 0; i < Shape::N / 2; i++) sum[i] = 0.0f;
    int stage = 0, parity = 0, last = 0;
#pragma unroll 1
    for (int step = 0; step < place.steps; step++) {
        memory.arrived[stage].wait(parity);
        const half_t *x = memory.x(stage) + group * 64 * TILE_COLUMNS, *w = memory.w(stage);
        products_begin();
#pragma unroll
        for (int k = 0; k < TILE_COLUMNS / 16; k++) Products<Shape::N>::add(sum, columns_of(x, k), columns_of(w, k));
        products_group();
        products_wait<1>();  // for the step before
        // Only where somebody waits for it: a block may be over by then.
        if (step > 0 && step - 1 + Shape::STAGES < place.steps && sender >= 0) memory.taken[last].arrive_at(sender);
        last = stage;
        if (++stage == Shape::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    products_wait<0>();
}

template <class Shape>
DEVICE void put_sums(float* sums, int group, const float (&sum)[Shape::N / 2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, row = 64 * group + threadIdx.x % WARPGROUP / 32 * 16 + g;
#pragma unroll
    for (int j = 0; j < Shape::N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[(row + e / 2 * 8) * Shape::PITCH + 8 * j + 2 * q + e % 2] = sum[4 * j + e];
}

// Eight outputs of a row of the block's share of a tile; of gate, where GATED, as many of up are N/2 columns further on.
template <class Shape, bool GATED>
struct WarpgroupEight {
    enum { EIGHTS = Shape::N / (GATED ? 16 : 8), ROWS = Shape::T / Shape::SPLIT, COUNT = ROWS * EIGHTS };
    int row, column, t, o;
    bool exists;
    DEVICE WarpgroupEight(const LinearArgs& a, const LinearPart& part, const WarpgroupPlace<Shape>& place, int i) {
        row = place.part * ROWS + i / EIGHTS;
        column = i % EIGHTS * 8;
        t = place.t0 + row;
        o = place.o0 + column;
        exists = i < COUNT && t < a.rows && o < part.outputs;
    }
    // The sums of all blocks that share the tile's columns, added up in order.
    DEVICE void products(const WarpgroupPlace<Shape>& place, const float* sums, bool up, float (&product)[8]) const {
        const float* own = sums + row * Shape::PITCH + column + (up ? Shape::N / 2 : 0);
        if constexpr (Shape::SPLIT == 1) {
            load8(own, product);
        } else {
#pragma unroll
            for (int p = 0; p < Shape::SPLIT; p++)
#pragma unroll
                for (int j = 0; j < 8; j += 4) {
                    const Float4 some = load_of_block(own + j, place.rank(place.x, place.y, p));
#pragma unroll
                    for (int c = 0; c < 4; c++) product[j + c] = p == 0 ? some.v[c] : product[j + c] + some.v[c];
                }
        }
    }
};

// The same of gate and up, and silu(gate)·up of what was stored of them.
template <class Shape>
DEVICE void store_gated(const LinearArgs& a, const WarpgroupPlace<Shape>& place, const float* sums) {
    typedef WarpgroupEight<Shape, true> Eight;
    const LinearPart &gate = a.parts[0], &up = a.parts[1];
#pragma unroll 1
    for (int base = threadIdx.x; base < Eight::COUNT; base += Shape::THREADS) {
        const Eight eight(a, gate, place, base);
        if (!eight.exists) continue;
        float x[8], y[8];
        eight.products(place, sums, false, x);
        eight.products(place, sums, true, y);
        store_eight(a, gate, eight.t, eight.o, x, EightOperands());
        store_eight(a, up, eight.t, eight.o, y, EightOperands());
        float z[8];
#pragma unroll
        for (int j = 0; j < 8; j++) z[j] = activate(rounded<half_t>(x[j]), SILU) * rounded<half_t>(y[j]);
        half_t* const to = (half_t*)gate.turned + (int64_t)eight.t * gate.outputs + eight.o;
        if (EightOperands::at_once(a, gate, eight.o)) store8(to, z);
        else
            for (int j = 0; j < 8 && eight.o + j < gate.outputs; j++) store(to + j, z[j]);
    }
}

// Stores the block's share of a tile, and what follows from it.
template <class Shape>
DEVICE void store_sums(const LinearArgs& a, const LinearPart& part, const WarpgroupPlace<Shape>& place, const float* sums) {
    typedef WarpgroupEight<Shape, false> Eight;
    enum { AT_ONCE = 4 };  // whose operands are on their way
    if (place.gate_up) return store_gated(a, place, sums);
#pragma unroll 1
    for (int base = threadIdx.x; base < Eight::COUNT; base += AT_ONCE * Shape::THREADS) {
        EightOperands with[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const Eight eight(a, part, place, base + n * Shape::THREADS);
            if (eight.exists) with[n].fetch(a, part, eight.t, eight.o);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const Eight eight(a, part, place, base + n * Shape::THREADS);
            if (!eight.exists) continue;
            float product[8];
            eight.products(place, sums, false, product);
            store_eight(a, part, eight.t, eight.o, product, with[n]);
        }
    }
}

template <class Shape>
DEVICE void linear_warpgroup(const WarpgroupArgs& args) {
    DYNAMIC(uint8_t, dynamic);
    const LinearArgs& a = args.linear;
    const LinearPart& part = a.parts[blockIdx.z];
    const WarpgroupPlace<Shape> place(a);
    if (place.o0 - place.x * place.width >= part.outputs) return;  // another weight has more; and so for the whole cluster
    const WarpgroupMemory<Shape> memory(aligned(&dynamic, TILE_ALIGNMENT));
    if (threadIdx.x == Shape::CONSUMERS) {
        prefetch_map(args.x);
        prefetch_map(args.w[blockIdx.z]);
    }
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Shape::STAGES; stage++) {
            memory.arrived[stage].init(1);
            memory.taken[stage].init((Shape::X + Shape::Y - 1) * Shape::CONSUMERS / 32);
        }
        barriers_are_ready();
    }
    cluster_arrive();
    cluster_wait();

    const int group = warp_uniform(threadIdx.x / WARPGROUP);
    const bool multiplies = group < Shape::CONSUMERS / WARPGROUP;
    float sum[Shape::N / 2];
    if (multiplies) multiply_steps(place, memory, group, sum);
    else {
        if (threadIdx.x % 32 == 0) bring_steps(args, place, memory);
        __syncwarp();
    }
    __syncthreads();  // the last tiles are multiplied
    if (multiplies) put_sums<Shape>(memory.sums(), group, sum);
    wait_for_last();
    if (Shape::SPLIT > 1) {
        cluster_release();
        cluster_wait();  // the sums of other blocks are there too
        store_sums(a, part, place, memory.sums());
        cluster_arrive();
    } else {
        __syncthreads();
        cluster_arrive();
        store_sums(a, part, place, memory.sums());
    }
    cluster_wait();  // nobody reads another's memory any more, or arrives there
}

#define LINEAR_WARPGROUP(name, blocks, groups, n, stages, x, y, split)                                            \
    typedef WarpgroupShape<groups, n, stages, x, y, split> WarpgroupShape_##name;                                   \
    KERNEL_CLUSTER(linear_warpgroup_##name, WarpgroupArgs, WarpgroupShape_##name::THREADS, blocks, x * split, y, \
                   linear_warpgroup<WarpgroupShape_##name>)
// Names: rows x outputs of a tile, and into how many parts its columns are split.
LINEAR_WARPGROUP(128x160, 1, 2, 160, 5, 2, 2, 1)
LINEAR_WARPGROUP(128x128, 2, 2, 128, 3, 1, 2, 1)
LINEAR_WARPGROUP(128x128_4, 1, 2, 128, 6, 1, 2, 4)
LINEAR_WARPGROUP(64x128, 2, 1, 128, 4, 1, 2, 1)
LINEAR_WARPGROUP(64x128_2, 2, 1, 128, 4, 1, 2, 2)
LINEAR_WARPGROUP(64x64, 2, 1, 64, 6, 2, 2, 1)
LINEAR_WARPGROUP(64x64_4, 2, 1, 64, 6, 1, 1, 4)

#endif  // HAS_WARPGROUPS
