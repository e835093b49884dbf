// Products of a warp's tensor core, and how operands get there, on the CPU.
#pragma once
#include "cuda_on_host.h"

namespace cushim {

// A warp's product of 16 rows and 8 columns in f64, rounded once: `products(w, row, column)` is what is added to d.
template <class Products>
void multiply(float d[4], const uint32_t a[4], const uint32_t b[2], Products products) {
    const int lane = machine->current->index % 32, g = lane / 4, q = lane % 4;
    WarpMatrices& w = machine->warps[machine->current->index / 32];
    memcpy(w.a[lane], a, 16);
    memcpy(w.b[lane], b, 8);
    warp_op(SYNC, 0xffffffffu, 0, 0);
    for (int part = 0; part < 4; part++) d[part] += products(w, g + part / 2 * 8, 2 * q + part % 2);
    warp_op(SYNC, 0xffffffffu, 0, 0);
}

// mma.m16n8k16 with f16 operands and f32 accumulation.
inline void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    const auto half_of = [](uint32_t two, int which) { return double(half_to_float(two >> (16 * which))); };
    multiply(d, a, b, [&](const WarpMatrices& w, int row, int column) {
        double sum = 0;
        for (int k = 0; k < 16; k++) {
            const uint32_t x = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const uint32_t y = w.b[column * 4 + k % 8 / 2][k / 8];
            sum += half_of(x, k % 2) * half_of(y, k % 2);
        }
        return sum;
    });
}

// mma.m16n8k8 with operands in TF32 and f32 accumulation.
inline void mma_1688(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    const auto value = [](uint32_t bits) {
        float x;
        bits &= 0xffffe000u;
        memcpy(&x, &bits, 4);
        return double(x);
    };
    multiply(d, a, b, [&](const WarpMatrices& w, int row, int column) {
        double sum = 0;
        for (int k = 0; k < 8; k++)
            sum += value(w.a[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * value(w.b[column * 4 + k % 4][k / 4]);
        return sum;
    });
}

// ldmatrix.m8n8.x4
inline void load_matrices(uint32_t out[4], const void* row) {
    const int lane = machine->current->index % 32;
    const void** rows = machine->warps[machine->current->index / 32].rows;
    rows[lane] = row;
    warp_op(SYNC, 0xffffffffu, 0, 0);
    for (int n = 0; n < 4; n++) memcpy(&out[n], (const char*)rows[8 * n + lane / 4] + lane % 4 * 4, 4);
    warp_op(SYNC, 0xffffffffu, 0, 0);
}

// ldmatrix.m8n8.x4.trans
inline void load_matrices_transposed(uint32_t out[4], const void* row) {
    const int lane = machine->current->index % 32;
    const void** rows = machine->warps[machine->current->index / 32].rows;
    rows[lane] = row;
    warp_op(SYNC, 0xffffffffu, 0, 0);
    for (int n = 0; n < 4; n++)
        for (int e = 0; e < 2; e++) {
            const char* from = (const char*)rows[8 * n + lane % 4 * 2 + e];
            memcpy((char*)&out[n] + 2 * e, from + lane / 4 * 2, 2);
        }
    warp_op(SYNC, 0xffffffffu, 0, 0);
}

}  // namespace cushim
