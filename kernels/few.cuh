// What the kernels for few token rows have in common: which outputs make a tile, what follows from their products, and
// how it is stored, with the bits of the kernels that do it alone (bias.cu, add.cu, rope.cu, glu.cu, cache.cu, norm.cu).
#pragma once
#include "activation.cuh"
#include "linear.cuh"
#include "rope.cuh"

enum { FEW_OUTPUTS = 16 };

// A warp's sums of a tile lie in dynamic shared memory, COLUMNS token rows wide.
template <int COLUMNS>
using FewSums = float[FEW_OUTPUTS][COLUMNS];

// Output `i` of the first eight of a tile; number i + 8 is `few_step` further on, where outputs go in pairs its partner.
DEVICE int few_output(const LinearArgs& a, const LinearPart& part, int tile, int i) {
    if (part.pairs == HALVES) {
        const uint32_t half_head = (uint32_t)a.head_width / 2, pair = 8 * tile, head = pair / half_head;
        return pair + head * half_head + i;
    }
    return part.pairs == GATE_UP ? 8 * tile + i : 16 * tile + (part.pairs == NEIGHBOURS ? 2 * i : i);
}
DEVICE int few_step(const LinearArgs& a, const LinearPart& part) {
    if (part.pairs == HALVES) return a.head_width / 2;
    return part.pairs == ALONE ? 8 : part.pairs == NEIGHBOURS ? 1 : 0;
}

// The RMS norm of a row by one warp: 1 / sqrt(mean(x²) + eps), the squares summed in f32, four chains a lane and a tree.
DEVICE float few_scale(const half_t* x, int columns, double eps) {
    enum { AT_ONCE = 8 };  // loads under way
    float chain[4] = {};
    for (int base = 8 * (threadIdx.x % 32); base < columns; base += 256 * AT_ONCE) {
        Half8 eight[AT_ONCE];
        const Half8 zero = {};
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) eight[n] = base + 256 * n < columns ? *(const Half8*)(x + base + 256 * n) : zero;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float v = to_float(eight[n].v[j]);
                chain[j % 4] = fmaf(v, v, chain[j % 4]);
            }
    }
    const float squares = warp_sum((chain[0] + chain[1]) + (chain[2] + chain[3]));
    return 1.0f / sqrtf(squares / columns + (float)eps);
}

// What a thread's outputs are put together with: fetched before the products are there.
struct FewOperands {
    float other[2], angle[2];
    int first;
};

// The operands for row t and outputs o: those that are constant in a step, or those that other kernels compute.
DEVICE void fetch_operands(const LinearArgs& a, const LinearPart& part, int t, const int o[2], bool computed, FewOperands& to) {
    const int sides = part.pairs == ALONE ? 1 : 2;
    if (t >= a.rows || o[0] >= part.outputs) return;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const LinearPart& own = part.pairs == GATE_UP ? a.parts[side] : part;
        if (side < sides && own.follow == (computed ? RESIDUAL : BIAS)) to.other[side] = operand_of<half_t>(own, t, o[side]);
    }
    if (computed) return;
    to.first = first_of(a, part);
    if (part.pairs != HALVES && part.pairs != NEIGHBOURS) return;
    const int within = o[0] % a.head_width, pair = part.pairs == HALVES ? within : within / 2;
    const float* angle = a.angles + ((int64_t)(*a.first + t) * (a.head_width / 2) + pair) * 2;
    to.angle[0] = angle[0];
    to.angle[1] = angle[1];
}

// Stores two products that go together, and what is computed from both. `second`: the part of `up`, where it is gate and up.
DEVICE void store_pair(const LinearArgs& a, const LinearPart& part, const LinearPart& second, int t, const int o[2],
                       const float product[2], const FewOperands& with) {
    if (part.pairs == GATE_UP) {
        const float gate = store_values<half_t>(part, t, o[0], product[0], with.other[0]);
        const float up = store_values<half_t>(second, t, o[1], product[1], with.other[1]);
        const int64_t i = (int64_t)t * part.outputs + o[0];
        store((half_t*)part.turned + i, activate(gate, SILU) * up);
        return;
    }
    const float x = store_values<half_t>(part, t, o[0], product[0], with.other[0]);
    const float y = store_values<half_t>(part, t, o[1], product[1], with.other[1]);
    const Rotated z = rotate(x, y, with.angle[0], with.angle[1]);
    const float results[2] = {rounded<half_t>(z.a), rounded<half_t>(z.b)};
#pragma unroll
    for (int e = 0; e < 2; e++) {
        store((half_t*)part.turned + (int64_t)t * part.outputs + o[e], results[e]);
        append(a, part, with.first, t, o[e], results[e]);
    }
}

// Item `i` of a tile to be stored: which row and outputs.
template <int COLUMNS>
struct FewItem {
    int r, column, t, o[2];
    DEVICE FewItem(const LinearArgs& a, const LinearPart& part, int tile, int t0, int i) {
        const int bits = part.pairs == ALONE ? 4 : 3, step = few_step(a, part);  // of the number of outputs or pairs
        r = i & ((1 << bits) - 1);
        column = i >> bits;
        t = column < COLUMNS ? t0 + column : a.rows;
        const int first = few_output(a, part, tile, r % 8);
        o[0] = first + r / 8 * step;
        o[1] = first + step;
    }
};

// Adds up the warps' sums of one tile, AT_ONCE under way, and stores the products. `with` has the operands of a thread's first item.
template <int COLUMNS, int AT_ONCE>
DEVICE void store_few(const LinearArgs& a, const LinearPart& part, const FewSums<COLUMNS>* sums, int tile, int t0,
                      FewOperands& with) {
    const int warps = blockDim.x / 32, sides = part.pairs == ALONE ? 1 : 2;
    for (int i = threadIdx.x;; i += blockDim.x) {
        const FewItem<COLUMNS> item(a, part, tile, t0, i);
        if (item.t >= a.rows) return;  // and so are all after it
        float product[2] = {};
#pragma unroll
        for (int side = 0; side < 2; side++) {
            if (side >= sides) break;
#pragma unroll AT_ONCE
            for (int w = 0; w < warps; w++) product[side] += sums[w][item.r + 8 * side][item.column];
        }
        if (i != (int)threadIdx.x) {
            fetch_operands(a, part, item.t, item.o, false, with);
            fetch_operands(a, part, item.t, item.o, true, with);
        }
        if (item.o[0] >= part.outputs) continue;
        if (sides == 2) store_pair(a, part, a.parts[1], item.t, item.o, product, with);
        else store_output_with<half_t>(a, part, with.first, item.t, item.o[0], product[0], with.other[0]);
    }
}
