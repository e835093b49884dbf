// The block formats of GGUF: eight consecutive weights of a row, decoded to f32.
//
// Every format is a struct with `decode8(row, i, out)`: out[j] = w[i + j], i a multiple of 8; UNROLL is how many
// such decodes a loop should have under way. Formulas and layouts as in ggml-quants.c (dequantize_row_*); blocks of 32 or of 256 weights.
#pragma once
#include "common.cuh"

// Little-endian half at any 2-byte boundary.
DEVICE float half_at(const uint8_t* p) {
    half_t h;
    h.bits = *(const uint16_t*)p;
    return to_float(h);
}

struct F32 {
    enum { UNROLL = 4 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        load8((const float*)row + i, out);
    }
};

struct F16 {
    enum { UNROLL = 4 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        load8((const half_t*)row + i, out);
    }
};

struct BF16 {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const Half8 h = *(const Half8*)((const half_t*)row + i);
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = bf16_to_float(h.v[j].bits);
    }
};

// ---------------------------------------------------------------- blocks of 32
// Nibble formats: weight l < 16 in the low half of byte l, weight l >= 16 in the high half of byte l - 16.

DEVICE int nibble(const uint8_t* qs, int l) { return l < 16 ? qs[l] & 15 : qs[l - 16] >> 4; }

// { half d; int8 q[32] }: w = d·q
struct Q8_0 {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 32) * 34;
        const float d = half_at(b);
        const uint16_t* q = (const uint16_t*)(b + 2 + i % 32);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint16_t two = q[j];
            out[2 * j] = d * (int8_t)(two & 255);
            out[2 * j + 1] = d * (int8_t)(two >> 8);
        }
    }
};

// { half d; nibbles[16] }: w = d·(q - 8)
struct Q4_0 {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 32) * 18;
        const float d = half_at(b);
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = d * (nibble(b + 2, i % 32 + j) - 8);
    }
};

// { half d, m; nibbles[16] }: w = d·q + m
struct Q4_1 {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 32) * 20;
        const float d = half_at(b), m = half_at(b + 2);
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = d * nibble(b + 4, i % 32 + j) + m;
    }
};

// Fifth bit of weight l: bit l of four bytes.
DEVICE int fifth_bit(const uint8_t* qh, int l) { return (qh[l / 8] >> (l % 8) & 1) << 4; }

// { half d; high[4]; nibbles[16] }: w = d·(q - 16)
struct Q5_0 {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 32) * 22;
        const float d = half_at(b);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int l = i % 32 + j;
            out[j] = d * ((nibble(b + 6, l) | fifth_bit(b + 2, l)) - 16);
        }
    }
};

// { half d, m; high[4]; nibbles[16] }: w = d·q + m
struct Q5_1 {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 32) * 24;
        const float d = half_at(b), m = half_at(b + 2);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int l = i % 32 + j;
            out[j] = d * (nibble(b + 8, l) | fifth_bit(b + 4, l)) + m;
        }
    }
};

// The sixteen levels of the IQ4 formats (ggml: kvalues_iq4nl), packed four to a word, lowest byte first.
DEVICE float iq4_level(int q) {
    const uint32_t words[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
    const uint32_t word = q < 8 ? (q < 4 ? words[0] : words[1]) : (q < 12 ? words[2] : words[3]);
    return (float)(int8_t)(word >> (8 * (q % 4)) & 255);
}

// { half d; nibbles[16] }: w = d·level(q)
struct IQ4_NL {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 32) * 18;
        const float d = half_at(b);
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = d * iq4_level(nibble(b + 2, i % 32 + j));
    }
};

// ---------------------------------------------------------------- super-blocks of 256

// { scale | min << 4 [16]; two-bit q[64]; half d, dmin }: w = d·scale·q - dmin·min, 16 weights a scale
struct Q2_K {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 256) * 84;
        const int e = i % 256, half_block = e / 128, shift = e % 128 / 32 * 2;
        const uint8_t* q = b + 16 + half_block * 32 + e % 32;
        const int s = b[e / 16];
        const float scale = half_at(b + 80) * (s & 15), low = half_at(b + 82) * (s >> 4);
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = scale * (q[j] >> shift & 3) - low;
    }
};

// { high bit[32]; two-bit q[64]; six-bit scales[12]; half d }: w = d·(scale - 32)·(q - 4·(1 - high))
struct Q3_K {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 256) * 110;
        const int e = i % 256, half_block = e / 128, quarter = e % 128 / 32;
        const uint8_t *high = b + e % 32, *q = b + 32 + half_block * 32 + e % 32, *s = b + 96;
        const int g = e / 16, bit = half_block * 4 + quarter;
        const int low4 = g < 8 ? s[g] & 15 : s[g - 8] >> 4;
        const int scale = low4 | (s[8 + g % 4] >> (2 * (g / 4)) & 3) << 4;
        const float d = half_at(b + 108) * (scale - 32);
#pragma unroll
        for (int j = 0; j < 8; j++)
            out[j] = d * ((q[j] >> (2 * quarter) & 3) - ((high[j] >> bit & 1) ? 0 : 4));
    }
};

// Six-bit scale and minimum of sub-block g (ggml: get_scale_min_k4).
DEVICE void scale_min_k4(const uint8_t* s, int g, int* scale, int* low) {
    *scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
    *low = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4;
}

// { half d, dmin; six-bit scales and minima[12]; nibbles[128] }: w = d·scale·q - dmin·min, 32 weights a scale
struct Q4_K {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 256) * 144;
        const int g = i % 256 / 32;
        int scale, low;
        scale_min_k4(b + 4, g, &scale, &low);
        const float d = half_at(b) * scale, m = half_at(b + 2) * low;
        const uint32_t* q = (const uint32_t*)(b + 16 + g / 2 * 32 + i % 32);
        const int shift = g % 2 * 4;
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = d * (int)(q[j / 4] >> (8 * (j % 4) + shift) & 15) - m;
    }
};

// { half d, dmin; six-bit scales and minima[12]; high bit[32]; nibbles[128] }: as Q4_K with five-bit q
struct Q5_K {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 256) * 176;
        const int g = i % 256 / 32;
        int scale, low;
        scale_min_k4(b + 4, g, &scale, &low);
        const float d = half_at(b) * scale, m = half_at(b + 2) * low;
        const uint32_t* q = (const uint32_t*)(b + 48 + g / 2 * 32 + i % 32);
        const uint32_t* high = (const uint32_t*)(b + 16 + i % 32);
        const int shift = g % 2 * 4;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int byte = 8 * (j % 4);
            const int five = (q[j / 4] >> (byte + shift) & 15) | (high[j / 4] >> (byte + g) & 1) << 4;
            out[j] = d * five - m;
        }
    }
};

// { low nibbles[128]; high pairs[64]; int8 scales[16]; half d }: w = d·scale·(q - 32), 16 weights a scale
struct Q6_K {
    // In device memory, where blocks begin at multiples of 16: 14 bytes more than in the file.
    enum { UNROLL = 2, BYTES = 224 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 256) * BYTES;
        const int e = i % 256, half_block = e / 128, quarter = e % 128 / 32, l = e % 32;
        const uint16_t* low = (const uint16_t*)(b + half_block * 64 + quarter % 2 * 32 + l);
        const uint16_t* high = (const uint16_t*)(b + 128 + half_block * 32 + l);
        const float d = half_at(b + 208) * (int8_t)b[192 + e / 16];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int byte = 8 * (j % 2);
            const int q = (low[j / 2] >> (byte + quarter / 2 * 4) & 15) | (high[j / 2] >> (byte + 2 * quarter) & 3) << 4;
            out[j] = d * (q - 32);
        }
    }
};

// { half d; uint16 high pairs; low nibbles of scales[4]; nibbles[128] }: w = d·(scale - 32)·level(q)
struct IQ4_XS {
    enum { UNROLL = 2 };
    static DEVICE void decode8(const uint8_t* row, int i, float out[8]) {
        const uint8_t* b = row + (i / 256) * 136;
        const int g = i % 256 / 32;
        const int high = *(const uint16_t*)(b + 2) >> (2 * g) & 3;
        const int scale = (b[4 + g / 2] >> (4 * (g % 2)) & 15) | high << 4;
        const float d = half_at(b) * (scale - 32);
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = d * iq4_level(nibble(b + 8 + g * 16, i % 32 + j));
    }
};

// Calls X(format, suffix) for every weight format.
#define FOR_EACH_FORMAT(X)                                                                       \
    X(F32, f32) X(F16, f16) X(BF16, bf16) X(Q8_0, q8_0) X(Q4_0, q4_0) X(Q4_1, q4_1)              \
    X(Q5_0, q5_0) X(Q5_1, q5_1) X(Q2_K, q2_k) X(Q3_K, q3_k) X(Q4_K, q4_k) X(Q5_K, q5_k)          \
    X(Q6_K, q6_k) X(IQ4_NL, iq4_nl) X(IQ4_XS, iq4_xs)
