// How a warp multiplies sixteen rows of quantised weights with one token row: what is stored goes from memory to shared
// memory in pieces of 16 bytes, each for the lane that asked for it, and from there to the tensor core as it is.
//
// A quant below 1024 is a subnormal half as it stands, 2^-24 of itself, so that a product of half x and quant is exact and
// nothing is decoded; scales meet the sums of sub-blocks, in f32. One instruction adds up a column of x for a row of
// weights, but has eight columns of x and four lanes with parts of a row: column n of x is 0 but for the lane whose
// sub-block is n, so that the sums of eight sub-blocks come apart.
//
// A chunk is CHUNK columns of sixteen rows, PIECES pieces each. Lane l of a warp asks for `COPIES` of them, the n-th at `slot`
// in shared memory, which is piece `piece` of row `row`, so that neighbouring lanes ask for neighbouring pieces. Lane
// 4g + q multiplies CHUNK/4 columns of rows g and g + 8, and meets no bank twice: `add`, with the chunk's columns of x, of
// which each four lie as 0 2 1 3 if SWAPPED, in which order the halves of a word hold quants. `finish` gives the sums of
// both rows, in every lane. BLOCK_SUMS: `add` is given the sums of x over eight sub-blocks of 32, that of sub-block s at
// s % 2 * 4 + s / 2. DEPTH: chunks on their way.
#pragma once
#include "mma.cuh"
#include "quants.cuh"

// Two pairs of halves added up.
DEVICE uint32_t add_halves(uint32_t a, uint32_t b) {
#ifdef CUDA_ON_HOST
    uint32_t sum = 0;
    for (int side = 0; side < 2; side++) {
        half_t x, y;
        x.bits = (uint16_t)(a >> (16 * side));
        y.bits = (uint16_t)(b >> (16 * side));
        sum |= (uint32_t)to_half(to_float(x) + to_float(y)).bits << (16 * side);
    }
    return sum;
#else
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
#endif
}
DEVICE float low_half(uint32_t two) {
    half_t h;
    h.bits = (uint16_t)(two & 0xffffu);
    return to_float(h);
}
DEVICE float high_half(uint32_t two) {
    half_t h;
    h.bits = (uint16_t)(two >> 16);
    return to_float(h);
}

// Sums of one row's part, over the lanes that share it.
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// The columns of x of one chunk, or zeros of the same length.
struct ChunkOfX {
    const half_t *x, *zeros;
    const float* sums;
    // What lane 4g + q gives for column n of x, n = q + 4·side: its columns from `at` on, or zeros.
    DEVICE const half_t* column(int g, int q, int side, int at) const { return g == q + 4 * side ? x + at : zeros; }
};

template <class W>
struct Pieces;

// Of rows that lie one behind the other.
template <int EACH>
struct PiecesInRows {
    enum { PIECES = EACH, STAGE = 16 * EACH, DEPTH = 2 };
    static DEVICE int row(int slot) { return slot / EACH; }
    static DEVICE int piece(int slot) { return slot % EACH; }
};

template <>
struct Pieces<F16> {
    enum { CHUNK = 128, PIECES = 16, STAGE = 256, DEPTH = 2, SWAPPED = 0, BLOCK_SUMS = 0 };
    // A lane's own: four of row g, then four of row g + 8, all lanes' first ones side by side.
    static DEVICE int row(int slot) { return slot % 32 / 4 + slot / 128 * 8; }
    static DEVICE int piece(int slot) { return slot / 32 % 4 * 4 + slot % 4; }
    float sum[2][4];
    DEVICE void clear() {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[0][e] = sum[1][e] = 0.0f;
    }
    DEVICE void add(const Words4* from, const ChunkOfX& x, int g, int q) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const Words4 a = from[32 * j + 4 * g + q], b = from[128 + 32 * j + 4 * g + q];
            const Words4 xs = *(const Words4*)(x.x + padded(32 * j) + 8 * q);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint32_t w[4] = {a.v[2 * k], b.v[2 * k], a.v[2 * k + 1], b.v[2 * k + 1]};
                mma_16816(sum[k], w, xs.v + 2 * k);
            }
        }
    }
    DEVICE void finish(float (&out)[2]) const {
        out[0] = sum[0][0] + sum[1][0];
        out[1] = sum[0][2] + sum[1][2];
    }
};

// Adds up what the chains of a sub-block have come to.
template <int CHAINS>
DEVICE void add_chains(const float (&chain)[CHAINS][4], float (&sum)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        sum[e] = chain[0][e] + chain[1][e];
#pragma unroll
        for (int c = 2; c < CHAINS; c += 2) sum[e] += chain[c][e] + chain[c + 1][e];
    }
}

// Q4_K, and Q5_K, which has a fifth bit.
template <bool FIFTH>
struct PiecesK : PiecesInRows<FIFTH ? 11 : 9> {
    enum { CHUNK = 256, QUANTS = FIFTH ? 3 : 1, ROW = QUANTS + 8, SWAPPED = 1, BLOCK_SUMS = 1 };  // QUANTS: where they begin
    float total[2];
    DEVICE void clear() { total[0] = total[1] = 0.0f; }
    // Word i of the quants from `from` on: of sub-block 2q, and of 2q + 1 sixteen times as large; columns 0 and 2 of its
    // four, then 1 and 3. Fifth bits lie at `bits`.
    static DEVICE void quants(const Words4& from, const Words4& bits, int i, int q, uint32_t (&low)[2], uint32_t (&high)[2]) {
        const uint32_t w = from.v[i];
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            low[odd] = w >> (8 * odd) & 0x000f000fu;
            high[odd] = w >> (8 * odd) & 0x00f000f0u;
        }
        if (!FIFTH) return;
        const uint32_t fifth = bits.v[i] >> (2 * q);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const uint32_t two = fifth >> (8 * odd);
            low[odd] |= two << 4 & 0x00100010u;
            high[odd] |= two << 7 & 0x01000100u;
        }
    }
    DEVICE void add(const Words4* from, const ChunkOfX& x, int g, int q) {
        const Words4 *first = from + g * ROW, *second = first + 8 * ROW;
        const half_t *even = x.column(g, q, 0, 72 * q), *odd = x.column(g, q, 1, 72 * q + 32);
        float chain[4][4] = {};
#pragma unroll 1
        for (int part = 0; part < 2; part++) {
            const int at = QUANTS + 2 * q + part, fifths = FIFTH ? 1 + part : 0;
            const Words4 quants_of[2] = {first[at], second[at]}, bits_of[2] = {first[fifths], second[fifths]};
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const Words4 xe = *(const Words4*)(even + 16 * part + 4 * i), xo = *(const Words4*)(odd + 16 * part + 4 * i);
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    uint32_t low[2][2], high[2][2];
                    quants(quants_of[0], bits_of[0], i + k, q, low[0], high[0]);
                    quants(quants_of[1], bits_of[1], i + k, q, low[1], high[1]);
                    const uint32_t l[4] = {low[0][0], low[1][0], low[0][1], low[1][1]};
                    const uint32_t h[4] = {high[0][0], high[1][0], high[0][1], high[1][1]};
                    mma_16816(chain[k], l, xe.v + 2 * k);
                    mma_16816(chain[2 + k], h, xo.v + 2 * k);
                }
            }
        }
        float sum[4];
        add_chains(chain, sum);
        const Words4 heads[2] = {*first, *second};
        add_row(heads[0], sum, x.sums + 2 * q, q, total[0]);
        add_row(heads[1], sum + 2, x.sums + 2 * q, q, total[1]);
    }
    // Two sub-blocks of one row, those of columns 2q and 2q + 1: d·scale·Σ x·quant - dmin·min·Σ x (see scale_min_k4).
    static DEVICE void add_row(const Words4& head, const float* sum, const float* x, int q, float& to) {
        const uint32_t a = head.v[1], b = head.v[2], c = head.v[3];
        const bool upper = q % 2 == 1;  // sub-blocks 4 and on
        const uint32_t scales = upper ? (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u) : a & 0x3f3f3f3fu;
        const uint32_t minima = upper ? (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u) : b & 0x3f3f3f3fu;
        // The quants are 2^-24 or 16·2^-24 of themselves, six-bit numbers 2^-24.
        const float unit = q < 2 ? 281474976710656.0f : 17592186044416.0f;
        const float d = low_half(head.v[0]) * unit, low = high_half(head.v[0]) * -16777216.0f;
        const uint32_t scale = scales >> (q / 2 * 8) & 0x00ff00ffu, minimum = minima >> (q / 2 * 8) & 0x00ff00ffu;
        to = fmaf(d * low_half(scale), sum[0], to);
        to = fmaf(low * low_half(minimum), x[0], to);
        to = fmaf(d * high_half(scale), sum[1], to);
        to = fmaf(low * high_half(minimum), x[1], to);
    }
    DEVICE void finish(float (&out)[2]) const {
        out[0] = quad_sum(total[0]);
        out[1] = quad_sum(total[1]);
    }
};
template <>
struct Pieces<Q4_K> : PiecesK<false> {};
template <>
struct Pieces<Q5_K> : PiecesK<true> {};

// A lane has 16 weights of each quarter of half q/2: both nibbles of 32 bytes, and all four bit pairs of 16.
template <>
struct Pieces<Q6_K> : PiecesInRows<Q6_K::BYTES / 16> {
    enum { CHUNK = 256, ROW = Q6_K::BYTES / 16, SWAPPED = 1, BLOCK_SUMS = 0 };
    float total[2];
    DEVICE void clear() { total[0] = total[1] = 0.0f; }
    // Word i of quarter 2·set + side, less 32: columns 0 and 2 of its four, then 1 and 3.
    static DEVICE void quants(const Words4& lows, const Words4& highs, int set, int side, int i, uint32_t (&out)[2]) {
        const uint32_t low = lows.v[i] >> (4 * set) & 0x0f0f0f0fu;
        const uint32_t six = low | (highs.v[i] >> (4 * set) << (4 - 2 * side) & 0x30303030u);
        const uint32_t less = 0x80208020u;  // -32·2^-24 twice
        out[0] = add_halves(six & 0x00ff00ffu, less);
        out[1] = add_halves(six >> 8 & 0x00ff00ffu, less);
    }
    DEVICE void add(const Words4* from, const ChunkOfX& x, int g, int q) {
        const Words4 *first = from + g * ROW, *second = first + 8 * ROW;
        const int column = 144 * (q / 2) + 16 * (q % 2);
        const half_t* const columns[2] = {x.column(g, q, 0, column), x.column(g, q, 1, column)};
#pragma unroll 1
        for (int set = 0; set < 2; set++) {
            float chain[2][4] = {};
            const Words4 highs[2] = {first[8 + q], second[8 + q]};
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int at = 4 * (q / 2) + q % 2 + 2 * side;
                const Words4 lows[2] = {first[at], second[at]};
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const Words4 xs = *(const Words4*)(columns[side] + 72 * set + 32 * side + 4 * i);
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        uint32_t a[2], b[2];
                        quants(lows[0], highs[0], set, side, i + e, a);
                        quants(lows[1], highs[1], set, side, i + e, b);
                        const uint32_t w[4] = {a[0], b[0], a[1], b[1]};
                        mma_16816(chain[side], w, xs.v + 2 * e);
                    }
                }
            }
            float sum[4];
            add_chains(chain, sum);
            add_row(first, sum, set, q, total[0]);
            add_row(second, sum + 2, set, q, total[1]);
        }
    }
    // Two sub-blocks of 16 of one row: d·scale·Σ x·(quant - 32).
    static DEVICE void add_row(const Words4* row, const float* sum, int set, int q, float& to) {
        const uint32_t word = ((const uint32_t*)(row + 12))[q % 2 * 2 + set];
        const float d = low_half(row[13].v[0]) * 16777216.0f;  // 2^24
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int scale = (int8_t)(word >> (q / 2 * 16 + 8 * e) & 255);
            to = fmaf(d * (float)scale, sum[e], to);
        }
    }
    DEVICE void finish(float (&out)[2]) const {
        out[0] = quad_sum(total[0]);
        out[1] = quad_sum(total[1]);
    }
};
