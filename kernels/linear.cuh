// What the matrix products have in common: out[t, o] = Σ_i x[t, i]·w[o, i], for up to three weights that read
// the same x, and what follows at once: the bias, or the residual sum, and the KV cache.
//
// The product itself is stored in any case, rounded to what values are stored as, and what follows is computed
// from that: the same bits as by the kernels of bias.cu, add.cu and cache.cu.
#pragma once
#include "quants.cuh"

enum { NOTHING = 0, BIAS = 1, RESIDUAL = 2 };
// linear_few: which outputs are computed together, for what follows from two: columns i and i + E/2, or 2i and 2i + 1,
// of a head for the rotary embedding; or output i of two weights, gate and up.
enum { ALONE = 0, HALVES = 1, NEIGHBOURS = 2, GATE_UP = 3 };

// One weight.
struct LinearPart {
    const uint8_t* weight;  // (O, I) in the weight format, decoded inside the kernel
    int64_t row_bytes;      // of one weight row
    void* out;              // (T, O)
    const void* other;      // bias: (O,) in f32; residual: (T, O) as values are stored
    void* then;             // (T, O): out + scale[0]·bias, or scale[0]·out + scale[1]·residual
    void* cache;            // (S, O), or null: the last result is appended here
    void* turned;           // (T, O): what is computed from pairs
    float scale[2];
    int outputs;            // O
    int follow;             // NOTHING, BIAS, RESIDUAL
    int pairs;              // ALONE, HALVES, NEIGHBOURS; GATE_UP: of parts 0 and 1
    int other_format;       // linear_one: whether it has the second of the kernel's formats
};

struct LinearArgs {
    LinearPart parts[3];  // by blockIdx.z
    const void* x;        // (T, I)
    const int* first;     // position of row 0, (1,)
    const float* angles;  // (positions, E/2, 2): cosine, sine
    const float* norm_weight;  // (I,)
    void* normed;         // (1, I), or null: x is normed first, and the result stored here
    double eps;           // of the norm
    const void* next;     // weights of a later launch, to be brought to the second cache
    int64_t next_bytes;   // a multiple of 16
    int rows;             // T
    int columns;          // I, a multiple of 8
    int out_f32;          // whether out is f32 although x is f16 (the logits)
    int cache_f16;        // whether the cache is f16, else f32
    int split;            // linear_row: warps that share an output: 1, 2, 4 or 8; linear_one: that share a tile
    int head_width;       // E
    int groups;           // linear_one: tiles that a block computes at once
    int turns;            // linear_one: how often it does
    uint32_t split_inverse;  // linear_one: 2^16 / split, rounded up
    uint32_t head_inverse;   // linear_one: 2^32 / (E/2), rounded up
};

// What follows a product is computed with: the bias, or the residual.
template <class S>
DEVICE float operand_of(const LinearPart& part, int t, int o) {
    if (part.follow == NOTHING) return 0.0f;
    return part.follow == BIAS ? ((const float*)part.other)[o] : to_float(((const S*)part.other)[(int64_t)t * part.outputs + o]);
}

// Stores one product and the sum with `other` that follows it, which is returned.
template <class S>
DEVICE float store_values(const LinearPart& part, int t, int o, float product, float other) {
    const int64_t i = (int64_t)t * part.outputs + o;
    float y = rounded<S>(product);
    store((S*)part.out + i, y);
    if (part.follow == NOTHING) return y;
    y = part.follow == BIAS ? y + part.scale[0] * other : part.scale[0] * y + part.scale[1] * other;
    y = rounded<S>(y);
    store((S*)part.then + i, y);
    return y;
}

// The position of row 0, where a result is appended to a cache.
DEVICE int first_of(const LinearArgs& a, const LinearPart& part) { return part.cache ? *a.first : 0; }

// Appends the last result to the cache.
DEVICE void append(const LinearArgs& a, const LinearPart& part, int first, int t, int o, float y) {
    if (!part.cache) return;
    const int64_t at = ((int64_t)first + t) * part.outputs + o;
    if (a.cache_f16) store((half_t*)part.cache + at, y);
    else ((float*)part.cache)[at] = y;
}

// Stores one product and all that follows it.
template <class S>
DEVICE void store_output_with(const LinearArgs& a, const LinearPart& part, int first, int t, int o, float product, float other) {
    if (a.out_f32) ((float*)part.out)[(int64_t)t * part.outputs + o] = product;
    else append(a, part, first, t, o, store_values<S>(part, t, o, product, other));
}
template <class S>
DEVICE void store_output(const LinearArgs& a, const LinearPart& part, int t, int o, float product) {
    store_output_with<S>(a, part, first_of(a, part), t, o, product, operand_of<S>(part, t, o));
}

// What follows eight products is computed with, as it is stored: eight floats of a bias, or eight halves of a residual.
struct EightOperands {
    Words4 raw[2];
    // Nothing where eight outputs are not stored at once.
    DEVICE void fetch(const LinearArgs& a, const LinearPart& part, int t, int o) {
        if (part.follow == NOTHING || !at_once(a, part, o)) return;
        const int64_t i = (int64_t)t * part.outputs + o;
        if (part.follow == BIAS)
            for (int j = 0; j < 2; j++) raw[j] = ((const Words4*)((const float*)part.other + o))[j];
        else raw[0] = *(const Words4*)((const half_t*)part.other + i);
    }
    DEVICE float of(const LinearPart& part, int j) const {
        if (part.follow == BIAS) return __int_as_float((int)raw[j / 4].v[j % 4]);
        return j % 2 ? high_half(raw[0].v[j / 2]) : low_half(raw[0].v[j / 2]);
    }
    static DEVICE bool at_once(const LinearArgs& a, const LinearPart& part, int o) {
        return o + 8 <= part.outputs && part.outputs % 8 == 0 && !a.out_f32;
    }
};

// Stores eight products and the sums that follow, with the bits of store_output.
DEVICE void store_eight(const LinearArgs& a, const LinearPart& part, int t, int o, const float product[8], const EightOperands& with) {
    if (!with.at_once(a, part, o)) {
        for (int j = 0; j < 8 && o + j < part.outputs; j++) store_output<half_t>(a, part, t, o + j, product[j]);
        return;
    }
    const int64_t i = (int64_t)t * part.outputs + o;
    Half8 y;
#pragma unroll
    for (int j = 0; j < 8; j++) y.v[j] = to_half(product[j]);
    *(Half8*)((half_t*)part.out + i) = y;
    if (part.follow != NOTHING) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float x = to_float(y.v[j]), other = with.of(part, j);
            y.v[j] = to_half(part.follow == BIAS ? x + part.scale[0] * other : part.scale[0] * x + part.scale[1] * other);
        }
        *(Half8*)((half_t*)part.then + i) = y;
    }
    if (!part.cache) return;
    const int64_t at = ((int64_t)*a.first + t) * part.outputs + o;
    if (a.cache_f16) *(Half8*)((half_t*)part.cache + at) = y;
    else
        for (int j = 0; j < 8; j++) ((float*)part.cache)[at + j] = to_float(y.v[j]);
}

// A 64 x 64 tile of products in shared memory, on its way out: neighbouring threads store neighbouring columns.
enum { TILE = 64 };
typedef float ProductTile[TILE][TILE + 4];

template <class S>
DEVICE void store_tile(const LinearArgs& a, const LinearPart& part, const ProductTile& tile, int t0, int o0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) {
        const int t = t0 + i / TILE, o = o0 + i % TILE;
        if (t < a.rows && o < part.outputs) store_output<S>(a, part, t, o, tile[i / TILE][i % TILE]);
    }
}
