// Matrix product for one token row, fast: out[o] = Σ_i x[i]·w[o, i] on tensor cores, each weight read once.
//
// x is f16, quants of w are taken as they are and scaled in f32, sub-block by sub-block (pieces.cuh): nothing but the sums
// is rounded. Launch: grid (at most ceil(O / (16·groups)), 1, weights), 32·split·groups threads, and dynamic shared memory:
// see `OneMemory`. `split` warps share a tile of 16 outputs: chunk c goes to warp c % split of a group; a block computes
// `groups` tiles at once, and further ones by turns with the other blocks. The next DEPTH chunks of every warp are on their
// way, the first before the kernel ahead has ended. The warps' sums are added up in order, so that a result does not
// depend on the grid.
//
// The norm before the products, and what follows them, as in linear_few.cu, which rounds weights to f16; linear_row.cu
// computes the same in scalar arithmetic. ggml: ggml_mul_mat (MUL_MAT), and what follows it.
#include "few.cuh"
#include "pieces.cuh"

enum { ONE_ZEROS = 128 };  // columns

// Parts of a block's dynamic shared memory.
template <class W>
struct OneMemory {
    typedef Pieces<W> P;
    enum { RING = P::DEPTH * P::STAGE, SUMS = 2 * FEW_OUTPUTS * sizeof(float) };
    Words4* ring;       // (DEPTH, STAGE) of this warp
    float* sums;        // (2, warps, 16): of two tiles
    half_t *zeros, *x;  // (ONE_ZEROS,); (I,) at `padded`
    float* block_sums;  // (chunks, 8), where the format wants them
    DEVICE OneMemory(uint8_t* memory, int warp, int warps, int columns) {
        ring = (Words4*)memory + warp * RING;
        memory += warps * RING * sizeof(Words4);
        sums = (float*)memory;
        memory += warps * SUMS;
        zeros = (half_t*)memory;
        x = zeros + ONE_ZEROS;
        block_sums = (float*)(x + (padded(columns + P::CHUNK) + 7) / 8 * 8);
    }
};

// Eight columns of a chunk of the row, as they are stored; zeros beyond the last.
template <class W>
DEVICE Half8 one_eight(const LinearArgs& a, int chunk) {
    const int within = 8 * (threadIdx.x % 32), i = chunk * Pieces<W>::CHUNK + within;
    const Half8 zero = {};
    return within < Pieces<W>::CHUNK && i < a.columns ? *(const Half8*)((const half_t*)a.x + i) : zero;
}

// 1 / sqrt(mean(x²) + eps): every warp the squares of its own chunks, in f32, four chains a lane and a tree, and the
// warps in their order, four at a time. `squares`: (warps,); `eight` is of the warp's first chunk.
template <class W>
DEVICE float one_scale(const LinearArgs& a, Half8 eight, float* squares, int warp, int warps, int chunks) {
    const int lane = threadIdx.x % 32;
    float chain[4] = {};
#pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += warps) {
        if (chunk > warp) eight = one_eight<W>(a, chunk);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float x = to_float(eight.v[j]);
            chain[j % 4] = fmaf(x, x, chain[j % 4]);
        }
    }
    const float own = warp_sum((chain[0] + chain[1]) + (chain[2] + chain[3]));
    if (lane == 0) squares[warp] = own;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < warps; w += 4) {
        float some[4];
#pragma unroll
        for (int n = 0; n < 4; n++) some[n] = w + n < warps ? squares[w + n] : 0.0f;
        sum += (some[0] + some[1]) + (some[2] + some[3]);
    }
    return 1.0f / sqrtf(sum / a.columns + (float)a.eps);
}

// Brings the row to shared memory, normed where that is asked for: chunk c by warp c % warps.
template <class W>
DEVICE void one_row(const LinearArgs& a, const OneMemory<W>& memory, float (&weight)[8], int warp, int warps, int chunks) {
    typedef Pieces<W> P;
    const int lane = threadIdx.x % 32;
    const bool stores = a.normed && blockIdx.x == 0 && blockIdx.z == 0;
    Half8 eight = one_eight<W>(a, warp), next = one_eight<W>(a, warp + warps);
    const float scale = a.normed ? one_scale<W>(a, eight, memory.sums, warp, warps, chunks) : 1.0f;
#pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += warps) {
        const int i = chunk * P::CHUNK + 8 * lane;
        const Half8 here = eight;
        eight = next;
        next = one_eight<W>(a, chunk + 2 * warps);
        if (!a.normed && !P::SWAPPED && !P::BLOCK_SUMS) {
            if (8 * lane < P::CHUNK) *(Half8*)(memory.x + padded(i)) = here;
            continue;
        }
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = to_float(here.v[j]);
        if (a.normed && 8 * lane < P::CHUNK && i < a.columns) {
            if (chunk != warp) load8(a.norm_weight + i, weight);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] = rounded<half_t>(x[j] * scale * weight[j]);
            if (stores) store8((half_t*)a.normed + i, x);
        }
        if (P::BLOCK_SUMS) {
            float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
            sum = quad_sum(sum);
            const int block = lane / 4;
            if (lane % 4 == 0) memory.block_sums[8 * chunk + block % 2 * 4 + block / 2] = sum;
        }
        if (P::SWAPPED) {
#pragma unroll
            for (int j = 1; j < 8; j += 4) {
                const float second = x[j];
                x[j] = x[j + 1];
                x[j + 1] = second;
            }
        }
        if (8 * lane < P::CHUNK) store8(memory.x + padded(i), x);
    }
    __syncthreads();
}

// The sixteen rows of a tile, of which each lane asks for every 32nd piece of a chunk.
template <class W>
struct OneRows {
    typedef Pieces<W> P;
    enum { WHOLE = P::STAGE / 32, REST = P::STAGE % 32, COPIES = WHOLE + (REST > 0) };
    int offset[COPIES];   // of the lane's pieces from the tile's first, in pieces
    const uint8_t* from;  // the tile
    bool inside;          // whether all its rows are there
    DEVICE OneRows(const LinearArgs& a, const LinearPart& part, int lane) {
        const int pitch = part.row_bytes / 16, between = part.pairs == NEIGHBOURS ? 2 * pitch : pitch;
        const int64_t apart = (part.pairs == GATE_UP ? a.parts[1].weight - part.weight : 0) / 16;
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const int r = P::row(32 * n + lane), second = (int)apart + few_step(a, part) * pitch;
            offset[n] = r % 8 * between + (r < 8 ? 0 : second) + P::piece(32 * n + lane);
        }
    }
    DEVICE void go_to(const LinearArgs& a, const LinearPart& part, int tile) {
        from = part.weight + few_output(a, part, tile, 0) * part.row_bytes;
        inside = few_output(a, part, tile, 7) + few_step(a, part) < part.outputs;
    }
    DEVICE void fetch(const LinearArgs& a, const LinearPart& part, int tile, int chunk, Words4* to, int lane) const {
        if (inside && (chunk + 1) * P::PIECES * 16 <= part.row_bytes) {
            const uint8_t* const here = from + (int64_t)chunk * P::PIECES * 16;
#pragma unroll
            for (int n = 0; n < COPIES; n++)
                if (n < WHOLE || lane < REST) async_copy(to + 32 * n + lane, here + (int64_t)offset[n] * 16);
            return;
        }
        // Zeros for what there is not: outputs beyond the last, columns beyond the last.
#pragma unroll 1
        for (int slot = lane; slot < P::STAGE; slot += 32) {
            const int r = P::row(slot), side = r / 8, o = few_output(a, part, tile, r % 8) + side * few_step(a, part);
            const int64_t at = (chunk * P::PIECES + P::piece(slot)) * 16;
            const bool exists = o < part.outputs && at < part.row_bytes;
            const uint8_t* weight = part.pairs == GATE_UP ? a.parts[side].weight : part.weight;
            async_copy_or_zero(to + slot, exists ? weight + o * part.row_bytes + at : weight, exists);
        }
    }
};

// x, in a register from here on: a constant would be fetched again where it is used, which takes its time.
template <class X>
DEVICE X held(X x) {
#ifdef CUDA_ON_HOST
    return x;
#else
    return __shfl_sync(FULL_WARP, x, threadIdx.x % 32);
#endif
}
DEVICE void* held(void* p) { return (void*)held((int64_t)p); }

// What is known of a result before its product is there.
DEVICE LinearPart held_part(LinearPart part) {
    part.out = held(part.out);
    part.then = held(part.then);
    part.cache = held(part.cache);
    part.turned = held(part.turned);
    part.scale[0] = held(part.scale[0]);
    part.scale[1] = held(part.scale[1]);
    part.outputs = held(part.outputs);
    part.follow = held(part.follow);
    part.pairs = held(part.pairs);
    return part;
}
DEVICE void hold(FewItem<1>& item) {
    item.r = held(item.r);
    item.t = held(item.t);
    item.o[0] = held(item.o[0]);
    item.o[1] = held(item.o[1]);
}

// What one warp of a group stores of a tile: its sums, added up in the order of the warps, four at a time, lane by lane.
DEVICE void store_one(const LinearArgs& a, const LinearPart& part, const float* sums, const FewItem<1>& item,
                      const FewOperands& with) {
    if (item.t >= a.rows || item.o[0] >= part.outputs) return;
    float product[2] = {};
    for (int w = 0; w < a.split; w += 4) {
        float some[2][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float* const of = sums + (w + n) * FEW_OUTPUTS + item.r;
            some[0][n] = w + n < a.split ? of[0] : 0.0f;
            some[1][n] = w + n < a.split && part.pairs != ALONE ? of[8] : 0.0f;
        }
#pragma unroll
        for (int side = 0; side < 2; side++) product[side] += (some[side][0] + some[side][1]) + (some[side][2] + some[side][3]);
    }
    if (part.pairs != ALONE) store_pair(a, part, 0, item.o, product, with);
    else store_output_with<half_t>(a, part, with.first, 0, item.o[0], product[0], with.other[0]);
}

template <class W>
DEVICE void linear_one(const LinearArgs& a) {
    typedef Pieces<W> P;
    DYNAMIC(Words4, dynamic);
    const LinearPart& part = a.parts[blockIdx.z];
    const LinearPart kept = held_part(part);
    const bool gate_up = part.pairs == GATE_UP;
    const int tiles = (part.outputs + (gate_up ? 7 : 15)) / (gate_up ? 8 : FEW_OUTPUTS);
    const int warp = warp_uniform(threadIdx.x / 32), warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int group = warp / a.split, own = warp % a.split, groups = warps / a.split;
    if ((int)blockIdx.x * groups >= tiles) return;  // another weight has more
    const int g = lane / 4, q = lane % 4, chunks = (a.columns + P::CHUNK - 1) / P::CHUNK;
    const OneMemory<W> memory((uint8_t*)&dynamic, warp, warps, a.columns);

    // What is asked for next: chunks of tiles.
    const int stride = gridDim.x * groups, start = blockIdx.x * groups + group;
    int tile = start, chunk = own, stage = 0;
    OneRows<W> rows(a, part, lane);
    rows.go_to(a, part, tile);
    const auto fetch = [&] {
        if (tile < tiles && chunk < chunks) {
            rows.fetch(a, part, tile, chunk, memory.ring + stage * P::STAGE, lane);
            stage = stage + 1 == P::DEPTH ? 0 : stage + 1;
            chunk += a.split;
            if (chunk >= chunks) {
                chunk = own;
                tile += stride;
                if (tile < tiles) rows.go_to(a, part, tile);
            }
        }
        async_group();
    };
    // The first weights, and all that is constant, are on their way before the kernel ahead has ended.
#pragma unroll
    for (int n = 0; n < P::DEPTH; n++) fetch();
    float norm_weight[8] = {};
    const int column = warp * P::CHUNK + 8 * lane;
    if (a.normed && 8 * lane < P::CHUNK && column < a.columns) load8(a.norm_weight + column, norm_weight);
    FewOperands with = {};
    const bool stores = own == 0 && lane < FEW_OUTPUTS;
    FewItem<1> item(a, part, tile, 0, lane);
    const auto operands = [&](int tile, bool computed) {
        if (!stores || tile >= tiles) return;
        if (!computed) item = FewItem<1>(a, part, tile, 0, lane);
        fetch_operands(a, part, item.t, item.o, computed, with);
    };
    operands(start, false);
    hold(item);
    if (threadIdx.x < ONE_ZEROS / 8) {
        const Half8 zero = {};
        *(Half8*)(memory.zeros + 8 * lane) = zero;
    }
    wait_for_last();
    operands(start, true);
    one_row<W>(a, memory, norm_weight, warp, warps, chunks);

    int turn = 0, from = 0;
#pragma unroll 1
    for (int now = start; now - group < tiles; now += stride, turn ^= 1) {
        float* const sums = memory.sums + (turn * warps + warp) * FEW_OUTPUTS;  // by turns, so that one barrier is enough
        if (now < tiles) {
            P sum;
            sum.clear();
#pragma unroll 1
            for (int c = own; c < chunks; c += a.split) {
                async_wait<P::DEPTH - 1>();
                __syncwarp();
                const Words4* arrived = memory.ring + from * P::STAGE;
                from = from + 1 == P::DEPTH ? 0 : from + 1;
                const ChunkOfX x = {memory.x + padded(c * P::CHUNK), memory.zeros, memory.block_sums + 8 * c};
                sum.add(arrived, x, g, q);
                __syncwarp();
                fetch();  // into the same place
            }
            float out[2];
            sum.finish(out);
            if (q == 0) {
                sums[g] = out[0];
                sums[g + 8] = out[1];
            }
        }
        if (a.split > 1) __syncthreads();
        else __syncwarp();
        if (stores && now < tiles) store_one(a, kept, sums, item, with);
        operands(now + stride, false);
        operands(now + stride, true);
    }
}

// Weights of two formats with blocks of the same length.
template <class W, class OTHER>
DEVICE void linear_one_of(const LinearArgs& a) {
    if (a.parts[blockIdx.z].other_format) linear_one<OTHER>(a);
    else linear_one<W>(a);
}

#define LINEAR_ONE(suffix, threads, ...) KERNEL_AHEAD(linear_one_##suffix, LinearArgs, threads, 1, __VA_ARGS__)
LINEAR_ONE(f16, 640, linear_one<F16>)
LINEAR_ONE(q4_k, 576, linear_one<Q4_K>)
LINEAR_ONE(q5_k, 576, linear_one<Q5_K>)
LINEAR_ONE(q6_k, 576, linear_one<Q6_K>)
LINEAR_ONE(q4_k_q6_k, 576, linear_one_of<Q4_K, Q6_K>)
LINEAR_ONE(q5_k_q6_k, 576, linear_one_of<Q5_K, Q6_K>)
