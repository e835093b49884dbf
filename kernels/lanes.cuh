// How the lanes of a warp take a chunk of weight rows into the fragments of a tensor core, decoded in registers.
//
// A chunk is CHUNK columns of a row; lane 4g + q has CHUNK/4 of them, in groups of eight consecutive columns, and the
// same of row g + 8. Which columns does not matter to a sum as long as x is taken in the same order, so every format
// gives a lane what lies together: `column(q, j)` says where group j of a lane begins. `load` reads what the lane
// needs, by the widest loads that the format's alignment allows; `group(q, j, out)` decodes group j to eight halves,
// by the formulas of quants.cuh: in f32, rounded once. Formats without code of their own take `decode8`. THREADS and
// BLOCKS bound the registers of the kernel for one row: of as many blocks of so many threads at once.
#pragma once
#include "mma.cuh"
#include "quants.cuh"

// Weights are read once: they need no place in the first cache. Volatile, so that they are under way before what
// follows in the source.
DEVICE Words4 load_once(const void* p) {
#ifdef CUDA_ON_HOST
    return *(const Words4*)p;
#else
    Words4 w;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3])
                 : "l"(p));
    return w;
#endif
}
DEVICE uint32_t load_word(const uint32_t* p) {
#ifdef CUDA_ON_HOST
    return *p;
#else
    uint32_t w;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(w) : "l"(p));
    return w;
#endif
}

DEVICE int shift_of(const uint8_t* p) { return ((int64_t)p & 2) * 8; }

// N words from a multiple of 2 bytes on, as they lie in the aligned words around them.
template <int N>
struct Unaligned {
    uint32_t raw[N + 1];
    // `shift` is 16 where p is no multiple of 4, else 0.
    DEVICE void load(const uint8_t* p, int shift) {
        const uint32_t* from = (const uint32_t*)((int64_t)p & ~(int64_t)3);
#pragma unroll
        for (int i = 0; i < N; i++) raw[i] = load_word(from + i);
        raw[N] = load_word(from + (shift ? N : N - 1));  // not beyond what there is
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i <= N; i++) raw[i] = 0;
    }
    DEVICE uint32_t word(int i, int shift) const {
#ifdef CUDA_ON_HOST
        return shift ? raw[i] >> 16 | raw[i + 1] << 16 : raw[i];
#else
        return __funnelshift_r(raw[i], raw[i + 1], shift);
#endif
    }
};

// Two integers below 1024 as floats, each 2^-24 of itself: the bits of an integer are those of a subnormal half. Nothing
// is rounded, nor by a factor 2^24 after it.
enum { UNIT_OF_HALVES = 1 << 24 };
DEVICE void tiny_pair(uint32_t two, float& low, float& high) {
    half_t h;
    h.bits = (uint16_t)(two & 0xffffu);
    low = to_float(h);
    h.bits = (uint16_t)(two >> 16);
    high = to_float(h);
}

// Eight integers below 256, the bytes of two words, as halves: scale·(byte - offset) + shift.
DEVICE void scaled_bytes(uint32_t low, uint32_t high, int offset, float scale, float shift, uint32_t out[4]) {
    const float factor = scale * (float)UNIT_OF_HALVES, less = (float)offset / (float)UNIT_OF_HALVES;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const uint32_t word = w == 0 ? low : high;
        float b[4];
        tiny_pair(word & 0x00ff00ffu, b[0], b[2]);
        tiny_pair(word >> 8 & 0x00ff00ffu, b[1], b[3]);
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = fmaf(factor, offset == 0 ? b[j] : b[j] - less, shift);
        out[2 * w] = two_halves_of(b[0], b[1]);
        out[2 * w + 1] = two_halves_of(b[2], b[3]);
    }
}

// Eight integers below 16, the low or the high halves of the bytes of two words, likewise.
DEVICE void scaled_nibbles(uint32_t low, uint32_t high, bool upper, int offset, float scale, float shift, uint32_t out[4]) {
    const uint32_t mask = upper ? 0x00f000f0u : 0x000f000fu;
    const float unit = (float)UNIT_OF_HALVES / (upper ? 16.0f : 1.0f), factor = scale * unit, less = (float)offset / unit;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const uint32_t word = w == 0 ? low : high;
        float b[4];
        tiny_pair(word & mask, b[0], b[2]);
        tiny_pair(word >> 8 & mask, b[1], b[3]);
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = fmaf(factor, offset == 0 ? b[j] : b[j] - less, shift);
        out[2 * w] = two_halves_of(b[0], b[1]);
        out[2 * w + 1] = two_halves_of(b[2], b[3]);
    }
}

// Any format, by its decode8: nothing is read ahead.
template <class W>
struct Lanes {
    enum { CHUNK = 128, UNROLL = 1, THREADS = 384, BLOCKS = 1 };
    const uint8_t* row;
    int at;
    DEVICE void load(const uint8_t* from, int base, int q, int) {
        row = from;
        at = base + 32 * q;
    }
    static DEVICE int column(int q, int j) { return 32 * q + 8 * j; }
    DEVICE void group(int, int j, uint32_t out[4]) const {
        float w[8];
        W::decode8(row, at + 8 * j, w);
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = two_halves_of(w[2 * i], w[2 * i + 1]);
    }
};

template <>
struct Lanes<F16> {
    enum { CHUNK = 128, UNROLL = 4, THREADS = 320, BLOCKS = 2 };
    Words4 words[4];
    DEVICE void load(const uint8_t* row, int base, int q, int columns) {
        const Words4 zero = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = base + column(q, j);
            words[j] = i < columns ? load_once((const half_t*)row + i) : zero;
        }
    }
    static DEVICE int column(int q, int j) { return 32 * j + 8 * q; }
    DEVICE void group(int, int j, uint32_t out[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = words[j].v[i];
    }
};

template <>
struct Lanes<Q8_0> {
    enum { CHUNK = 128, UNROLL = 4, THREADS = 320, BLOCKS = 2 };
    Unaligned<8> quants;
    int shift;
    float d;
    DEVICE void load(const uint8_t* row, int base, int q, int columns) {
        const uint8_t* b = row + (base / 32 + q) * 34;
        shift = shift_of(b + 2);
        if (base + 32 * q < columns) {
            quants.load(b + 2, shift);
            d = half_at(b);
        } else {
            quants.clear();
            d = 0.0f;
        }
    }
    static DEVICE int column(int q, int j) { return 32 * q + 8 * j; }
    DEVICE void group(int, int j, uint32_t out[4]) const {
        const uint32_t sign = 0x80808080u;
        scaled_bytes(quants.word(2 * j, shift) ^ sign, quants.word(2 * j + 1, shift) ^ sign, 128, d, 0.0f, out);
    }
};

template <>
struct Lanes<Q4_0> {
    enum { CHUNK = 128, UNROLL = 4, THREADS = 320, BLOCKS = 2 };
    Unaligned<4> quants;
    int shift;
    float d;
    DEVICE void load(const uint8_t* row, int base, int q, int columns) {
        const uint8_t* b = row + (base / 32 + q) * 18;
        shift = shift_of(b + 2);
        if (base + 32 * q < columns) {
            quants.load(b + 2, shift);
            d = half_at(b);
        } else {
            quants.clear();
            d = 0.0f;
        }
    }
    static DEVICE int column(int q, int j) { return 32 * q + 8 * j; }
    DEVICE void group(int, int j, uint32_t out[4]) const {
        const int from = 2 * (j % 2);
        scaled_nibbles(quants.word(from, shift), quants.word(from + 1, shift), j / 2 == 1, 8, d, 0.0f, out);
    }
};

// Six-bit scale and minimum of sub-blocks 2q and 2q + 1 (see scale_min_k4): d·scale, and -dmin·min.
struct ScalesK4 {
    float scale[2], shift[2];
    // `head` holds half d, dmin; six-bit scales and minima[12].
    DEVICE ScalesK4(const Words4& head, int q) {
        const uint32_t a = head.v[1], b = head.v[2], c = head.v[3];
        const int at = 16 * (q % 2);
        const uint32_t scales = q < 2 ? a & 0x3f3f3f3fu : (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
        const uint32_t minima = q < 2 ? b & 0x3f3f3f3fu : (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
        half_t d, low;
        d.bits = (uint16_t)(head.v[0] & 0xffffu);
        low.bits = (uint16_t)(head.v[0] >> 16);
#pragma unroll
        for (int g = 0; g < 2; g++) {
            scale[g] = to_float(d) * (float)(int)(scales >> (at + 8 * g) & 255);
            shift[g] = -(to_float(low) * (float)(int)(minima >> (at + 8 * g) & 255));
        }
    }
};

template <>
struct Lanes<Q4_K> {
    enum { CHUNK = 256, UNROLL = 8, THREADS = 288, BLOCKS = 2 };
    Words4 head, quants[2];
    DEVICE void load(const uint8_t* row, int base, int q, int) {
        const uint8_t* b = row + base / 256 * 144;
        head = load_once(b);
        quants[0] = load_once(b + 16 + 32 * q);
        quants[1] = load_once(b + 32 + 32 * q);
    }
    static DEVICE int column(int q, int j) { return 64 * q + 8 * j; }
    DEVICE void group(int q, int j, uint32_t out[4]) const {
        const ScalesK4 scales(head, q);
        const uint32_t* from = &quants[j % 4 / 2].v[j % 2 * 2];
        scaled_nibbles(from[0], from[1], j / 4 == 1, 0, scales.scale[j / 4], scales.shift[j / 4], out);
    }
};

template <>
struct Lanes<Q5_K> {
    enum { CHUNK = 256, UNROLL = 8, THREADS = 288, BLOCKS = 1 };
    Words4 head, high[2], quants[2];
    DEVICE void load(const uint8_t* row, int base, int q, int) {
        const uint8_t* b = row + base / 256 * 176;
        head = load_once(b);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            high[i] = load_once(b + 16 + 16 * i);
            quants[i] = load_once(b + 48 + 32 * q + 16 * i);
        }
    }
    static DEVICE int column(int q, int j) { return 64 * q + 8 * j; }
    DEVICE void group(int q, int j, uint32_t out[4]) const {
        const ScalesK4 scales(head, q);
        uint32_t five[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t four = quants[j % 4 / 2].v[j % 2 * 2 + i] >> (j / 4 * 4) & 0x0f0f0f0fu;
            const uint32_t fifth = high[j % 4 / 2].v[j % 2 * 2 + i] >> (2 * q + j / 4) & 0x01010101u;
            five[i] = four | fifth << 4;
        }
        scaled_bytes(five[0], five[1], 0, scales.scale[j / 4], scales.shift[j / 4], out);
    }
};

// A lane has 16 weights of each quarter of half q/2: both nibbles of 32 bytes, and all four bit pairs of 16.
template <>
struct Lanes<Q6_K> {
    enum { CHUNK = 256, UNROLL = 8, THREADS = 288, BLOCKS = 2 };
    Words4 low[2], high, scales;
    float d;
    DEVICE void load(const uint8_t* row, int base, int q, int) {
        const uint8_t* b = row + base / 256 * Q6_K::BYTES;
        const int half_block = q / 2, side = 16 * (q % 2);
        low[0] = load_once(b + 64 * half_block + side);
        low[1] = load_once(b + 64 * half_block + 32 + side);
        high = load_once(b + 128 + 32 * half_block + side);
        scales = load_once(b + 192);
        d = half_at(b + 208);
    }
    static DEVICE int column(int q, int j) { return 128 * (q / 2) + 16 * (q % 2) + 32 * (j / 2) + 8 * (j % 2); }
    DEVICE void group(int q, int j, uint32_t out[4]) const {
        const int quarter = j / 2;
        uint32_t six[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t four = low[quarter % 2].v[j % 2 * 2 + i] >> (quarter / 2 * 4) & 0x0f0f0f0fu;
            const uint32_t two = high.v[j % 2 * 2 + i] >> (2 * quarter) & 0x03030303u;
            six[i] = four | two << 4;
        }
        const uint32_t word = q / 2 ? scales.v[2 + quarter / 2] : scales.v[quarter / 2];
        const int scale = (int8_t)(word >> (16 * (quarter % 2) + 8 * (q % 2)) & 255);
        scaled_bytes(six[0], six[1], 32, d * (float)scale, 0.0f, out);
    }
};
