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

// What a warp does of a block's tiles: tile `group` of every `groups`, chunk `own` of every `split`.
struct OneShare {
    int split, groups, group, own, chunks;
    int base, end;  // tiles of the block
};

// The next place of a ring of DEPTH chunks, in bytes.
template <class P>
DEVICE int next_place(int place) {
    return place + 16 * P::STAGE == 16 * P::DEPTH * P::STAGE ? 0 : place + 16 * P::STAGE;
}

// The chunks that a warp asks for, one behind the other: of a tile's sixteen rows each lane every 32nd piece.
template <class W>
struct OneQueue {
    typedef Pieces<W> P;
    enum { BYTES = 16 * P::PIECES, WHOLE = P::STAGE / 32, REST = P::STAGE % 32, COPIES = WHOLE + (REST > 0) };
    Place ring;
    const uint8_t *weight, *from;   // the warp's first chunk of row 0; the next chunk of the tile's first row
    int offset[COPIES];             // of the lane's pieces from that, in pieces
    int tile, chunk, place, pitch;  // what is asked for next, and where it goes; bytes of a row
    DEVICE OneQueue(const LinearArgs& a, const LinearPart& part, const OneTiles& tiles, const OneShare& share, Words4* ring)
        : ring(ring), tile(share.base + share.group), chunk(share.own), place(0), pitch(part.row_bytes) {
        const int64_t apart = (part.pairs == GATE_UP ? a.parts[1].weight - part.weight : 0) / 16;
        const int row = pitch / 16, second = (int)apart + tiles.step * row;
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const int slot = 32 * n + threadIdx.x % 32, r = P::row(slot);
            offset[n] = r % 8 * tiles.between * row + (r < 8 ? 0 : second) + P::piece(slot);
        }
        weight = part.weight + share.own * BYTES;
        from = weight + (int64_t)tiles.first(tile) * pitch;
    }
    DEVICE void fetch(const OneTiles& tiles, const OneShare& share) {
        if (tile < share.end) {
            const int lane = threadIdx.x % 32;
            const Place own = ring.behind(place + 16 * lane);
#pragma unroll
            for (int n = 0; n < COPIES; n++)
                if (n < WHOLE || lane < REST) own.async_copy_to(16 * 32 * n, from + (int64_t)offset[n] * 16);
            place = next_place<P>(place);
            chunk += share.split;
            from += share.split * BYTES;
            if (chunk >= share.chunks) {
                chunk = share.own;
                tile += share.groups;
                from = weight + (int64_t)tiles.first(tile) * pitch;
            }
        }
        async_group();
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
DEVICE float one_scale(const LinearArgs& a, Words4 eight, float* squares, const OneShare& share) {
    const int lane = threadIdx.x % 32, own = share.own;
    if (share.group == 0) {
        float chain[4] = {};
#pragma unroll 1
        for (int chunk = own; chunk < share.chunks; chunk += share.split) {
            if (chunk > own) eight = one_eight<W>(a, chunk);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float x[2] = {low_half(eight.v[i]), high_half(eight.v[i])};
                chain[i] = fmaf(x[1], x[1], fmaf(x[0], x[0], chain[i]));
            }
        }
        const float sum = warp_sum((chain[0] + chain[1]) + (chain[2] + chain[3]));
        if (lane == 0) squares[own] = sum;
        if (own == 0 && lane >= share.split && lane < ONE_SQUARES) squares[lane] = 0.0f;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll 1
    for (int w = 0; w < share.split; w += 4) {
        const Float4 some = *(const Float4*)(squares + w);
        sum += (some.v[0] + some.v[1]) + (some.v[2] + some.v[3]);
    }
    return rsqrtf(sum / a.columns + (float)a.eps);
}

// A warp's columns of x: the chunk `at` is where the lanes multiply it, the next one is on its way.
template <class W>
struct OneColumns {
    typedef Pieces<W> P;
    LaneOfX x;
    Words4 ahead;
    float weight[8], scale;  // of the norm: of the warp's first chunk
    int at;
    DEVICE OneColumns() : at(-1) {}
    static DEVICE bool has() { return (int)(8 * (threadIdx.x % 32)) < P::CHUNK; }
    static DEVICE int column(int chunk) { return chunk * P::CHUNK + 8 * (threadIdx.x % 32); }

    // Eight columns normed and rounded, and stored if this is the warp that does.
    DEVICE void norm(const LinearArgs& a, Words4& eight, int chunk, bool stores) {
        if (!has()) return;
        if (at >= 0) load8(a.norm_weight + column(chunk), weight);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float two[2] = {low_half(eight.v[i]) * scale, high_half(eight.v[i]) * scale};
            eight.v[i] = two_halves_of(two[0] * weight[2 * i], two[1] * weight[2 * i + 1]);
        }
        if (stores) *(Words4*)((half_t*)a.normed + column(chunk)) = eight;
    }
    // Brings a chunk to the lanes, by way of `row`.
    DEVICE void take(const LinearArgs& a, const OneShare& share, int chunk, half_t* row, bool stores) {
        if (chunk == at) return;
        const int next = chunk + share.split < share.chunks ? chunk + share.split : share.own;
        Words4 eight = ahead;
        if (next != chunk) ahead = one_eight<W>(a, next);
        if (a.normed) norm(a, eight, chunk, stores);
        at = chunk;
        const int lane = threadIdx.x % 32;
        P::sums(x, eight, lane % 4);
        if (P::SWAPPED) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const uint32_t first = both_low(eight.v[i], eight.v[i + 1]);
                eight.v[i + 1] = both_high(eight.v[i], eight.v[i + 1]);
                eight.v[i] = first;
            }
        }
        __syncwarp();
        if (has()) *(Words4*)(row + padded(8 * lane)) = eight;
        __syncwarp();
        P::lane(x, row, lane / 4, lane % 4);
    }
};

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
    const int r = threadIdx.x % FEW_OUTPUTS, fours = in_fours(a.split);
#pragma unroll
    for (int side = 0; side < 2; side++) {
        if (side == 1 && part.pairs == ALONE) break;
#pragma unroll 1
        for (int w = 0; w < fours; w += 4) {
            const Float4 some = *(const Float4*)(sums + (r + 8 * side) * fours + w);
            product[side] += (some.v[0] + some.v[1]) + (some.v[2] + some.v[3]);
        }
    }
    if (part.pairs != ALONE) store_pair(a, part, parts[1], 0, item.o, product, item.with);
    else store_output_with<half_t>(a, part, item.with.first, 0, item.o[0], product[0], item.with.other[0]);
}

// The products of a warp's tiles between two barriers, `slots` tiles of the block from `start` on, into `sums`.
template <class W>
DEVICE void multiply(const LinearArgs& a, const OneTiles& tiles, const OneShare& share, OneQueue<W>& queue, OneColumns<W>& columns,
                     half_t* row, int& arrived, int start, int slots, float* sums) {
    typedef Pieces<W> P;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, fours = in_fours(share.split);
#pragma unroll 1
    for (int n = share.group; n < slots && start + n < share.end; n += share.groups) {
        P sum;
        sum.clear();
#pragma unroll 1
        for (int c = share.own; c < share.chunks; c += share.split) {
            columns.take(a, share, c, row, blockIdx.x == 0 && blockIdx.z == 0 && n == 0);
            async_wait<P::DEPTH - 1>();
            __syncwarp();
            sum.add(queue.ring.behind(arrived), columns.x, g, q);
            arrived = next_place<P>(arrived);
            __syncwarp();
            queue.fetch(tiles, share);  // into the same place
        }
        float out[2];
        sum.finish(out, q);
        if (q == 0) {
            float* const to = sums + (n * FEW_OUTPUTS + g) * fours + share.own;
            to[0] = out[0];
            to[8 * fours] = out[1];
        }
    }
}

template <class W>
DEVICE void linear_one(const LinearArgs& a) {
    typedef Pieces<W> P;
    DYNAMIC(Words4, dynamic);
    const LinearPart& part = a.parts[blockIdx.z];
    const int warp = warp_uniform(threadIdx.x / 32), of_block = a.turns * a.groups, outputs = part.pairs == GATE_UP ? 8 : FEW_OUTPUTS;
    OneShare share;
    share.split = a.split;
    share.groups = a.groups;
    share.group = warp * a.split_inverse >> 16;
    share.own = warp - share.group * a.split;
    share.chunks = a.columns / P::CHUNK;
    share.base = blockIdx.x * of_block;
    share.end = min((part.outputs + outputs - 1) / outputs, share.base + of_block);
    if (share.base >= share.end) return;  // another weight has more
    const int slots = min((int)ONE_BATCH, 2 * a.split) * a.groups, slot = threadIdx.x / FEW_OUTPUTS;
    const OneMemory<W> memory((uint8_t*)&dynamic, warp, blockDim.x / 32, slots);

    // The first weights, and all that is constant, are on their way before the kernel ahead has ended.
    const OneTiles tiles(a, part);
    OneQueue<W> queue(a, part, tiles, share, memory.ring);
#pragma unroll 1
    for (int n = 0; n < P::DEPTH; n++) queue.fetch(tiles, share);
    OneColumns<W> columns;
    if (a.normed && columns.has()) load8(a.norm_weight + columns.column(share.own), columns.weight);
    if (threadIdx.x < 2) memory.parts[threadIdx.x] = threadIdx.x == 0 ? part : a.parts[1];
    const bool stores = slot < slots;
    OneItem* const item = memory.items + threadIdx.x;
    const int fours = in_fours(a.split), of_batch = slots * FEW_OUTPUTS * fours;
    if (stores) {
        *item = one_item(a, part, tiles, share.base + slot, share.end);
        // What there is beyond the warps that share a tile counts as nothing.
#pragma unroll 1
        for (int w = a.split; w < fours; w++)
            for (int i = 0; i < 2; i++) memory.sums[i * of_batch + threadIdx.x * fours + w] = 0.0f;
    }
    wait_for_last();
    columns.ahead = one_eight<W>(a, share.own);
    const auto operands = [&] {
        if (stores && item->exists) fetch_operands(a, part, 0, item->o, true, item->with);
    };
    operands();
    columns.scale = a.normed ? one_scale<W>(a, columns.ahead, memory.squares, share) : 1.0f;

    int arrived = 0, turn = 0;
#pragma unroll 1
    for (int start = share.base; start < share.end; start += slots, turn ^= 1) {
        float* const sums = memory.sums + turn * of_batch;  // by turns, so that one barrier is enough
        multiply<W>(a, tiles, share, queue, columns, memory.row, arrived, start, slots, sums);
        __syncthreads();
        if (!stores) continue;
        store_one(a, memory.parts, *item, sums + slot * FEW_OUTPUTS * fours);
        if (start + slots >= share.end) break;
        *item = one_item(a, part, tiles, start + slots + slot, share.end);
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
