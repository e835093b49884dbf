// Matrix product for one token row, fast: out[o] = Σ_i x[i]·w[o, i] on tensor cores, each weight read once.
//
// x is f16, quants of w are taken as they are and scaled in f32, sub-block by sub-block (pieces.cuh): nothing but the sums
// is rounded. Launch: grid (blocks, 1, weights), 32·split·groups threads, and dynamic shared memory: see `OneMemory`.
// A block has `turns`·groups tiles of 16 outputs, one behind the other; `split` warps share a tile: chunk c goes to warp
// c % split of a group, which keeps its columns of x in registers from one tile to the next where it has one chunk of a row.
// The next DEPTH chunks of every warp are on their way, the first before the kernel ahead has ended. The warps' sums are
// added up in order, so that a result does not depend on the grid. Rows are whole chunks; the last tile ends with the last
// output, and shares some with the tile before it.
//
// The norm before the products, and what follows them, as in linear_few.cu, which rounds weights to f16; linear_row.cu
// computes the same in scalar arithmetic. ggml: ggml_mul_mat (MUL_MAT), and what follows it.
#include "few.cuh"
#include "pieces.cuh"

enum {
    ONE_BATCH = 4,     // tiles of a group between two barriers, at most
    ONE_SQUARES = 20,  // warps that share a row, at most
};

// Warps that share a row, in fours.
DEVICE int in_fours(int split) { return (split + 3) / 4 * 4; }

// What a thread stores of a batch of tiles, an output or a pair of them, with what that is put together with. It waits in
// shared memory: registers are for the products.
struct alignas(16) OneItem {
    int o[2];
    FewOperands with;
    int exists;
};

// Parts of a block's dynamic shared memory.
template <class W>
struct OneMemory {
    typedef Pieces<W> P;
    enum { RING = P::DEPTH * P::STAGE, ROW = P::CHUNK + P::CHUNK / 64 * 8 };
    Words4* ring;       // (DEPTH, STAGE) of this warp
    half_t* row;        // (ROW,) of this warp: a chunk of x on its way to the lanes
    float* squares;     // (ONE_SQUARES,)
    LinearPart* parts;  // (2,) of this block: a constant would be fetched again where it is used, which takes its time
    OneItem* items;     // (tiles of a batch, 16)
    float* sums;        // (2, tiles of a batch, 16, split in fours)
    DEVICE OneMemory(uint8_t* memory, int warp, int warps, int slots) {
        ring = (Words4*)memory + warp * RING;
        memory += warps * RING * sizeof(Words4);
        row = (half_t*)memory + warp * ROW;
        memory += warps * ROW * sizeof(half_t);
        squares = (float*)memory;
        parts = (LinearPart*)(squares + ONE_SQUARES);
        items = (OneItem*)(parts + 2);
        sums = (float*)(items + slots * FEW_OUTPUTS);
    }
};

// Where the outputs of a tile are: number r of the first eight at first + r·between, its partner `step` further on.
struct OneTiles {
    int between, step, apart, half_head, last;
    uint32_t head_inverse;
    DEVICE OneTiles(const LinearArgs& a, const LinearPart& part) {
        between = part.pairs == NEIGHBOURS ? 2 : 1;
        step = few_step(a, part);
        apart = part.pairs == HALVES || part.pairs == GATE_UP ? 8 : FEW_OUTPUTS;
        half_head = a.head_width / 2;
        head_inverse = part.pairs == HALVES ? a.head_inverse : 0;
        last = part.outputs - 1 - 7 * between - step;
    }
    // As few_output, but for the last tile.
    DEVICE int first(int tile) const {
        return min(tile * apart + (int)upper_half(tile * apart, head_inverse) * half_head, last);
    }
};

// The sixteen rows of a tile, of which each lane asks for every 32nd piece of a chunk.
template <class W>
struct OneRows {
    typedef Pieces<W> P;
    enum { WHOLE = P::STAGE / 32, REST = P::STAGE % 32, COPIES = WHOLE + (REST > 0) };
    int offset[COPIES];   // of the lane's pieces from the tile's first, in pieces
    const uint8_t* from;  // the chunk that is asked for next
    DEVICE OneRows(const LinearArgs& a, const LinearPart& part, const OneTiles& tiles, int lane) {
        const int pitch = part.row_bytes / 16;
        const int64_t apart = (part.pairs == GATE_UP ? a.parts[1].weight - part.weight : 0) / 16;
        const int second = (int)apart + tiles.step * pitch;
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const int r = P::row(32 * n + lane);
            offset[n] = r % 8 * tiles.between * pitch + (r < 8 ? 0 : second) + P::piece(32 * n + lane);
        }
    }
    DEVICE void fetch(const Place& to, int lane) const {
        const Place own = to.behind(16 * lane);
#pragma unroll
        for (int n = 0; n < COPIES; n++)
            if (n < WHOLE || lane < REST) own.async_copy_to(16 * 32 * n, from + (int64_t)offset[n] * 16);
    }
};

// Eight columns of a chunk of the row, as they are stored.
template <class W>
DEVICE Words4 one_eight(const LinearArgs& a, int chunk) {
    const int within = 8 * (threadIdx.x % 32);
    const Words4 zero = {};
    return within < Pieces<W>::CHUNK ? *(const Words4*)((const half_t*)a.x + chunk * Pieces<W>::CHUNK + within) : zero;
}

// 1 / sqrt(mean(x²) + eps): the first group's warps the squares of their own chunks, in f32, four chains a lane and a
// tree, and the warps in their order, four at a time. `eight` is of the warp's first chunk.
template <class W>
DEVICE float one_scale(const LinearArgs& a, Words4 eight, float* squares, int group, int own, int chunks) {
    const int lane = threadIdx.x % 32;
    if (group == 0) {
        float chain[4] = {};
#pragma unroll 1
        for (int chunk = own; chunk < chunks; chunk += a.split) {
            if (chunk > own) eight = one_eight<W>(a, chunk);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float x[2] = {low_half(eight.v[i]), high_half(eight.v[i])};
                chain[i] = fmaf(x[1], x[1], fmaf(x[0], x[0], chain[i]));
            }
        }
        const float sum = warp_sum((chain[0] + chain[1]) + (chain[2] + chain[3]));
        if (lane == 0) squares[own] = sum;
        if (own == 0 && lane >= a.split && lane < ONE_SQUARES) squares[lane] = 0.0f;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll 1
    for (int w = 0; w < a.split; w += 4) {
        const Float4 some = *(const Float4*)(squares + w);
        sum += (some.v[0] + some.v[1]) + (some.v[2] + some.v[3]);
    }
    return rsqrtf(sum / a.columns + (float)a.eps);
}

// Eight columns of x normed, rounded, and stored if this is the warp that does.
DEVICE void one_norm(const LinearArgs& a, Words4& eight, float scale, const float (&weight)[8], int column, bool stores) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x[2] = {low_half(eight.v[i]) * scale, high_half(eight.v[i]) * scale};
        eight.v[i] = two_halves_of(x[0] * weight[2 * i], x[1] * weight[2 * i + 1]);
    }
    if (stores) *(Words4*)((half_t*)a.normed + column) = eight;
}

// A warp's chunk of x, eight columns a lane, to where the lanes multiply it.
template <class W>
DEVICE void spread(Words4 eight, half_t* row, LaneOfX& x) {
    typedef Pieces<W> P;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    P::sums(x, eight, q);
    if (P::SWAPPED) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t first = both_low(eight.v[i], eight.v[i + 1]);
            eight.v[i + 1] = both_high(eight.v[i], eight.v[i + 1]);
            eight.v[i] = first;
        }
    }
    __syncwarp();
    if (8 * lane < P::CHUNK) *(Words4*)(row + padded(8 * lane)) = eight;
    __syncwarp();
    P::lane(x, row, g, q);
}

// Item of thread 16·n + r of a block: number r of tile n. What is constant in a step.
DEVICE OneItem one_item(const LinearArgs& a, const LinearPart& part, const OneTiles& tiles, int tile, int end) {
    OneItem item = {};
    const int r = threadIdx.x % FEW_OUTPUTS;
    item.exists = tile < end && (part.pairs == ALONE || r < 8);
    if (item.exists) {
        item.o[0] = tiles.first(tile) + r % 8 * tiles.between + r / 8 * tiles.step;
        item.o[1] = item.o[0] + tiles.step;
        fetch_operands(a, part, 0, item.o, false, item.with);
    }
    return item;
}

// The sums of the warps that share a tile, added up in their order, four at a time, and what follows. `sums`: (16, split in
// fours) of the tile.
DEVICE void store_one(const LinearArgs& a, const LinearPart parts[2], const OneItem& item, const float* sums) {
    const LinearPart& part = parts[0];
    if (!item.exists) return;
    float product[2] = {};
    const int r = threadIdx.x % FEW_OUTPUTS, fours = in_fours(a.split), partner = part.pairs == ALONE ? 0 : 8 * fours;
    sums += r * fours;
#pragma unroll 1
    for (int w = 0; w < fours; w += 4)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const Float4 some = *(const Float4*)(sums + side * partner + w);
            product[side] += (some.v[0] + some.v[1]) + (some.v[2] + some.v[3]);
        }
    if (part.pairs != ALONE) store_pair(a, part, parts[1], 0, item.o, product, item.with);
    else store_output_with<half_t>(a, part, item.with.first, 0, item.o[0], product[0], item.with.other[0]);
}

template <class W>
DEVICE void linear_one(const LinearArgs& a) {
    typedef Pieces<W> P;
    DYNAMIC(Words4, dynamic);
    const LinearPart& part = a.parts[blockIdx.z];
    // The warp's share of the block's tiles: number `group` of every `groups`, and of a row chunk `own` of every `split`.
    const int warp = warp_uniform(threadIdx.x / 32), warps = blockDim.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int groups = a.groups, group = warp * a.split_inverse >> 16, own = warp - group * a.split, chunks = a.columns / P::CHUNK;
    const int of_block = a.turns * groups, base = blockIdx.x * of_block, width = part.pairs == GATE_UP ? 8 : FEW_OUTPUTS;
    const int end = min((part.outputs + width - 1) / width, base + of_block);
    if (base >= end) return;  // another weight has more
    const int batch = min((int)ONE_BATCH, 2 * a.split), slots = batch * groups, slot = threadIdx.x / FEW_OUTPUTS;
    const OneMemory<W> memory((uint8_t*)&dynamic, warp, warps, slots);

    // What is asked for next: chunks of tiles.
    const Place ring(memory.ring);
    int tile = base + group, chunk = own, to = 0;
    const OneTiles tiles(a, part);
    OneRows<W> rows(a, part, tiles, lane);
    const int chunk_bytes = P::PIECES * 16, row_bytes = part.row_bytes;
    const uint8_t* const weight = part.weight + own * chunk_bytes;
    rows.from = weight + (int64_t)tiles.first(tile) * row_bytes;
    const auto fetch = [&] {
        if (tile < end) {
            rows.fetch(ring.behind(to), lane);
            to = to + 16 * P::STAGE == 16 * P::DEPTH * P::STAGE ? 0 : to + 16 * P::STAGE;
            chunk += a.split;
            rows.from += a.split * chunk_bytes;
            if (chunk >= chunks) {
                chunk = own;
                tile += groups;
                rows.from = weight + (int64_t)tiles.first(tile) * row_bytes;
            }
        }
        async_group();
    };
    // The first weights, and all that is constant, are on their way before the kernel ahead has ended.
#pragma unroll 1
    for (int n = 0; n < P::DEPTH; n++) fetch();
    float norm_weight[8] = {};
    const bool has_columns = 8 * lane < P::CHUNK, stores = slot < slots;
    if (a.normed && has_columns) load8(a.norm_weight + own * P::CHUNK + 8 * lane, norm_weight);
    OneItem* const item = memory.items + threadIdx.x;
    if (threadIdx.x < 2) memory.parts[threadIdx.x] = threadIdx.x == 0 ? part : a.parts[1];
    if (stores) *item = one_item(a, part, tiles, base + slot, end);
    const int fours = in_fours(a.split);
    if (stores)  // what there is of sums beyond the warps that share a tile counts as nothing
        for (int i = 0; i < 2; i++)
#pragma unroll 1
            for (int w = a.split; w < fours; w++) memory.sums[(i * slots * FEW_OUTPUTS + threadIdx.x) * fours + w] = 0.0f;
    wait_for_last();
    Words4 ahead = one_eight<W>(a, own);
    const auto operands = [&] {
        if (stores && item->exists) fetch_operands(a, part, 0, item->o, true, item->with);
    };
    operands();
    const float scale = a.normed ? one_scale<W>(a, ahead, memory.squares, group, own, chunks) : 1.0f;

    LaneOfX x;
    int at = -1, from = 0, turn = 0;  // the chunk of x that the lanes have; where the next weights arrive
#pragma unroll 1
    for (int start = base; start < end; start += slots, turn ^= 1) {
        float* const sums = memory.sums + turn * slots * FEW_OUTPUTS * fours;  // by turns, so that one barrier is enough
#pragma unroll 1
        for (int n = group; n < slots && start + n < end; n += groups) {
            P sum;
            sum.clear();
#pragma unroll 1
            for (int c = own; c < chunks; c += a.split) {
                if (c != at) {
                    const int column = c * P::CHUNK + 8 * lane, next = c + a.split < chunks ? c + a.split : own;
                    Words4 eight = ahead;
                    if (next != c) ahead = one_eight<W>(a, next);
                    if (a.normed && has_columns) {
                        if (at >= 0) load8(a.norm_weight + column, norm_weight);
                        one_norm(a, eight, scale, norm_weight, column, blockIdx.x == 0 && blockIdx.z == 0 && n == 0);
                    }
                    spread<W>(eight, memory.row, x);
                    at = c;
                }
                async_wait<P::DEPTH - 1>();
                __syncwarp();
                sum.add(ring.behind(from), x, g, q);
                from = from + 16 * P::STAGE == 16 * P::DEPTH * P::STAGE ? 0 : from + 16 * P::STAGE;
                __syncwarp();
                fetch();  // into the same place
            }
            float out[2];
            sum.finish(out, q);
            if (q == 0) {
                float* const to = sums + (n * FEW_OUTPUTS + g) * fours + own;
                to[0] = out[0];
                to[8 * fours] = out[1];
            }
        }
        __syncthreads();
        if (!stores) continue;
        store_one(a, memory.parts, *item, sums + slot * FEW_OUTPUTS * fours);
        if (start + slots >= end) break;
        *item = one_item(a, part, tiles, start + slots + slot, end);
        operands();
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
LINEAR_ONE(q4_k_q6_k, 512, linear_one_of<Q4_K, Q6_K>)
LINEAR_ONE(q5_k_q6_k, 512, linear_one_of<Q5_K, Q6_K>)
