// How a warp multiplies sixteen rows of quantised weights with one token row: what is stored goes from memory to shared
// memory in pieces of 16 bytes, each for the lane that asked for it, and from there to the tensor core as it is.
//
// A quant below 1024 is a subnormal half as it stands, 2^-24 of itself, so that a product of half x and quant is exact and
// nothing is decoded; scales meet the sums of sub-blocks, in f32. One instruction adds up a column of x for a row of
// weights, but has eight columns of x and four lanes with parts of a row: column n of x is 0 but for the lane whose
// sub-block is n, so that the sums of eight sub-blocks come apart. Four of them are of the low halves of what is multiplied
// (low nibbles, say) and four of the high ones: both meet the same columns of x, and half of either result is taken.
//
// A chunk is CHUNK columns of sixteen rows, PIECES pieces each. Lane l of a warp asks for `COPIES` of them, the n-th at `slot`
// in shared memory, which is piece `piece` of row `row`, so that neighbouring lanes ask for neighbouring pieces. Lane
// 4g + q multiplies CHUNK/4 columns of rows g and g + 8, and meets no bank twice: `add`, with `X`, what the lane has of the
// chunk's columns of x, which it finds at `padded` of the warp's row, each four of them as 0 2 1 3 if SWAPPED, in which
// order the halves of a word hold quants. `finish` gives the sums of both rows, in the lanes with q = 0. `sums` gives the lane the
// sums of x over sub-blocks of columns 2q and 2q + 1, if the format wants them. DEPTH: chunks on their way.
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
// Sums of one row's part, over the lanes that share it.
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// A place in shared memory, kept in a register: what lies at constant distances from it needs no arithmetic.
struct Place {
#ifdef CUDA_ON_HOST
    uint8_t* at;
    DEVICE explicit Place(const void* shared) : at((uint8_t*)shared) {}
    DEVICE Words4 load(int bytes) const { return *(const Words4*)(at + bytes); }
    DEVICE uint32_t load_word(int bytes) const { return *(const uint32_t*)(at + bytes); }
    DEVICE void async_copy_to(int bytes, const void* global) const { async_copy(at + bytes, global); }
#else
    uint32_t at;
    DEVICE explicit Place(const void* shared) {
        asm volatile("mov.u32 %0, %1;" : "=r"(at) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
    }
    DEVICE Words4 load(int bytes) const {
        Words4 w;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3])
                     : "r"(at + bytes)
                     : "memory");
        return w;
    }
    DEVICE uint32_t load_word(int bytes) const {
        uint32_t w;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(at + bytes) : "memory");
        return w;
    }
    DEVICE void async_copy_to(int bytes, const void* global) const {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + bytes), "l"(global) : "memory");
#else
        const Words4 w = *(const Words4*)global;
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at + bytes), "r"(w.v[0]), "r"(w.v[1]), "r"(w.v[2]), "r"(w.v[3])
                     : "memory");
#endif
    }
#endif
    DEVICE Place behind(int bytes) const {
        Place place = *this;
        place.at += bytes;
        return place;
    }
};

// What lane 4g + q has of a chunk of x: 32 columns, or zeros.
struct LaneOfX {
    uint32_t v[16];
    float sums[2];
    // Four times eight, which lie INNER apart, and each PAIR of them APART; zeros if it `has` none. In halves.
    template <int PAIR, int APART, int INNER>
    DEVICE void load(const half_t* row, bool has) {
        const Words4 zero = {};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const Words4 eight = has ? *(const Words4*)(row + n / PAIR * APART + n % PAIR * INNER) : zero;
#pragma unroll
            for (int i = 0; i < 4; i++) v[4 * n + i] = eight.v[i];
        }
    }
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
    enum { CHUNK = 128, PIECES = 16, STAGE = 256, DEPTH = 3, SWAPPED = 0 };
    // A lane's own: four of row g, then four of row g + 8, all lanes' first ones side by side.
    static DEVICE int row(int slot) { return slot % 32 / 4 + slot / 128 * 8; }
    static DEVICE int piece(int slot) { return slot / 32 % 4 * 4 + slot % 4; }
    // One instruction takes eight columns of a row as they lie, for eight rows: words 0 and 2 as of row g, for column 0 of x,
    // words 1 and 3 as of row g + 8, for column 1.
    static DEVICE void sums(LaneOfX&, const Words4&, int) {}
    static DEVICE void lane(LaneOfX& x, const half_t* row, int g, int q) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t* const eight = (const uint32_t*)(row + j / 2 * 72 + j % 2 * 32 + 8 * q) + g % 2;
            x.v[2 * j] = eight[0];
            x.v[2 * j + 1] = eight[2];
        }
    }
    float sum[2][2][4];
    DEVICE void clear() {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[0][0][e] = sum[0][1][e] = sum[1][0][e] = sum[1][1][e] = 0.0f;
    }
    DEVICE void add(const Place& from, const LaneOfX& x, int g, int q) {
        const Place own = from.behind(16 * (4 * g + q));
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const Words4 w = own.load(16 * (32 * j + 128 * row));
                mma_16816(sum[row][j % 2], w.v, x.v + 2 * j);
            }
    }
    // Lanes with q = 0 have columns 0 and 1.
    DEVICE void finish(float (&out)[2], int) const {
#pragma unroll
        for (int row = 0; row < 2; row++) out[row] = (sum[row][0][0] + sum[row][1][0]) + (sum[row][0][3] + sum[row][1][3]);
    }
};

// The sums of a lane's two columns, of both rows: columns below 4 are of the low halves.
DEVICE void choose(const float (&low)[4], const float (&high)[4], int q, float (&sum)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] = q < 2 ? low[e] : high[e];
}

// Q4_K, and Q5_K, which has a fifth bit.
template <bool FIFTH>
struct PiecesK : PiecesInRows<FIFTH ? 11 : 9> {
    enum { CHUNK = 256, QUANTS = FIFTH ? 3 : 1, ROW = QUANTS + 8, SWAPPED = 1 };  // QUANTS: where they begin
    // Column n is sub-block 2n, and 2(n - 4) + 1 from 4 on.
    static DEVICE void lane(LaneOfX& x, const half_t* row, int g, int q) {
        x.load<4, 0, 8>(row + 72 * q + g / 4 * 32, g % 4 == q);
    }
    static DEVICE void sums(LaneOfX& x, const Words4& eight, int q) {
        float two[4];
#pragma unroll
        for (int i = 0; i < 4; i++) two[i] = low_half(eight.v[i]) + high_half(eight.v[i]);
        const float of_block = quad_sum((two[0] + two[1]) + (two[2] + two[3]));
        const int first = q < 2 ? 4 * q : 4 * q - 7;
        x.sums[0] = __shfl_sync(FULL_WARP, of_block, 4 * first);
        x.sums[1] = __shfl_sync(FULL_WARP, of_block, 4 * first + 8);
    }
    float scaled[2], less[2];
    DEVICE void clear() { scaled[0] = scaled[1] = less[0] = less[1] = 0.0f; }
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
    DEVICE void add(const Place& from, const LaneOfX& x, int g, int q) {
        const Place row = from.behind(16 * ROW * g), own = row.behind(16 * (QUANTS + 2 * q));
        float low[4] = {}, high[4] = {}, sum[4];
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const Words4 quants_of[2] = {own.load(16 * part), own.load(16 * (8 * ROW + part))};
            Words4 bits_of[2] = {};
            if (FIFTH) bits_of[0] = row.load(16 * (1 + part));
            if (FIFTH) bits_of[1] = row.load(16 * (8 * ROW + 1 + part));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t lows[2][2], highs[2][2];
                quants(quants_of[0], bits_of[0], i, q, lows[0], highs[0]);
                quants(quants_of[1], bits_of[1], i, q, lows[1], highs[1]);
                const uint32_t l[4] = {lows[0][0], lows[1][0], lows[0][1], lows[1][1]};
                const uint32_t h[4] = {highs[0][0], highs[1][0], highs[0][1], highs[1][1]};
                mma_16816(low, l, x.v + 8 * part + 2 * i);
                mma_16816(high, h, x.v + 8 * part + 2 * i);
            }
        }
        choose(low, high, q, sum);
        add_row(row.load(0), sum[0], sum[1], x, q, 0);
        add_row(row.load(16 * 8 * ROW), sum[2], sum[3], x, q, 1);
    }
    // Two sub-blocks of one row, those of columns 2q and 2q + 1: d·scale·Σ x·quant - dmin·min·Σ x (see scale_min_k4).
    DEVICE void add_row(const Words4& head, float one, float two, const LaneOfX& x, int q, int row) {
        const uint32_t a = head.v[1], b = head.v[2], c = head.v[3];
        const bool upper = q % 2 == 1;  // sub-blocks 4 and on
        const int shift = q / 2 * 8;
        const uint32_t lower_bits = upper ? 0x000f000fu : 0x003f003fu, upper_bits = upper ? 0x00300030u : 0u;
        const uint32_t scale = ((upper ? c : a) >> shift & lower_bits) | (a >> (shift + 2) & upper_bits);
        const uint32_t minimum = ((upper ? c : b) >> (upper ? shift + 4 : shift) & lower_bits) | (b >> (shift + 2) & upper_bits);
        scaled[row] = fmaf(low_half(head.v[0]), fmaf(high_half(scale), two, low_half(scale) * one), scaled[row]);
        const float mins = fmaf(high_half(minimum), x.sums[1], low_half(minimum) * x.sums[0]);
        less[row] = fmaf(high_half(head.v[0]), mins, less[row]);
    }
    DEVICE void finish(float (&out)[2], int q) const {
        // The quants are 2^-24 or 16·2^-24 of themselves, six-bit numbers 2^-24.
        const float unit = q < 2 ? 281474976710656.0f : 17592186044416.0f;
#pragma unroll
        for (int row = 0; row < 2; row++) out[row] = quad_sum(fmaf(scaled[row], unit, less[row] * -16777216.0f));
    }
};
template <>
struct Pieces<Q4_K> : PiecesK<false> {};
template <>
struct Pieces<Q5_K> : PiecesK<true> {};

// A lane has 16 weights of each quarter of half q/2: both nibbles of 32 bytes, and all four bit pairs of 16. Quarters 0 and 1
// are as they are, 2 and 3 sixteen times as large.
template <>
struct Pieces<Q6_K> : PiecesInRows<Q6_K::BYTES / 16> {
    enum { CHUNK = 256, ROW = Q6_K::BYTES / 16, SWAPPED = 1 };
    static DEVICE void sums(LaneOfX&, const Words4&, int) {}
    static DEVICE void lane(LaneOfX& x, const half_t* row, int g, int q) {
        x.load<2, 72, 8>(row + 144 * (q / 2) + 16 * (q % 2) + g / 4 * 32, g % 4 == q);
    }
    float total[2];
    DEVICE void clear() { total[0] = total[1] = 0.0f; }
    // A word of quarter `side`, and of 2 + side, less 32 and 512: columns 0 and 2 of its four, then 1 and 3.
    static DEVICE void quants(uint32_t low, uint32_t high, int side, uint32_t (&first)[2], uint32_t (&second)[2]) {
        const uint32_t lows[2] = {low, low >> 8};
        const uint32_t highs[2] = {side == 0 ? high << 4 : high << 2, side == 0 ? high >> 4 : high >> 6};
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const uint32_t six = (lows[odd] & 0x000f000fu) | (highs[odd] & 0x00300030u);
            const uint32_t large = (lows[odd] & 0x00f000f0u) | (highs[odd] & 0x03000300u);
            first[odd] = add_halves(six, 0x80208020u);     // -32·2^-24 twice
            second[odd] = add_halves(large, 0x82008200u);  // -512·2^-24
        }
    }
    DEVICE void add(const Place& from, const LaneOfX& x, int g, int q) {
        const Place row = from.behind(16 * ROW * g), own = row.behind(16 * (4 * (q / 2) + q % 2)), top = row.behind(16 * (8 + q));
        const Place scales = row.behind(16 * 12 + 8 * (q % 2));
        const Words4 highs[2] = {top.load(0), top.load(16 * 8 * ROW)};
        float chain[2][2][4] = {};
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const Words4 lows[2] = {own.load(32 * side), own.load(16 * 8 * ROW + 32 * side)};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t a[2][2], b[2][2];
                quants(lows[0].v[i], highs[0].v[i], side, a[0], a[1]);
                quants(lows[1].v[i], highs[1].v[i], side, b[0], b[1]);
#pragma unroll
                for (int set = 0; set < 2; set++) {
                    const uint32_t w[4] = {a[set][0], b[set][0], a[set][1], b[set][1]};
                    mma_16816(chain[set][side], w, x.v + 8 * set + 2 * i);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float d = low_half(row.load_word(16 * (8 * ROW * r + 13)));
#pragma unroll
            for (int set = 0; set < 2; set++) {
                float sum[4];
                choose(chain[set][0], chain[set][1], q, sum);
                add_row(scales.load_word(16 * 8 * ROW * r + 4 * set), set == 0 ? d : d * 0.0625f, sum + 2 * r, q, total[r]);
            }
        }
    }
    // Two sub-blocks of 16 of one row: d·scale·Σ x·(quant - 32), 2^-24 of it.
    static DEVICE void add_row(uint32_t scales, float d, const float* sum, int q, float& to) {
        const int two = (int)(scales << (q < 2 ? 16 : 0));
        to = fmaf(d, fmaf((float)(two >> 24), sum[1], (float)(two << 8 >> 24) * sum[0]), to);
    }
    DEVICE void finish(float (&out)[2], int) const {
        const float unit = 16777216.0f;  // 2^24
        out[0] = quad_sum(total[0]) * unit;
        out[1] = quad_sum(total[1]) * unit;
    }
};
