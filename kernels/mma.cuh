// The tensor core instruction, and how operands get there.
#pragma once
#include "common.cuh"

// d += a·b for fragments of 16 x 16 and 16 x 8 (PTX ISA, mma.m16n8k16): lane 4g + q holds
//   a: (g, 2q..), (g + 8, 2q..), (g, 2q + 8..), (g + 8, 2q + 8..)   b: (2q.., g), (2q + 8.., g), two halves each
//   d: (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1)
DEVICE void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) {
#ifdef CUDA_ON_HOST
    cushim::mma_16816(d, a, b);
#elif __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else  // Turing has it with half the depth only
#pragma unroll
    for (int k = 0; k < 2; k++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

// The same for 16 x 8 and 8 x 8 of operands in TF32: f32 whose lower 13 bits are not looked at (PTX ISA, mma.m16n8k8):
//   a: (g, q), (g + 8, q), (g, q + 4), (g + 8, q + 4)   b: (q, g), (q + 4, g)   d: as above
// Turing has no such thing.
DEVICE void mma_1688(float d[4], const uint32_t a[4], const uint32_t b[2]) {
#ifdef CUDA_ON_HOST
    cushim::mma_1688(d, a, b);
#elif __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four matrices of 8 x 8 halves from shared memory (PTX ISA, ldmatrix): lane 8n + r gives the address of row r of matrix n,
// and lane 4g + q gets columns 2q and 2q + 1 of row g of each.
DEVICE void load_matrices(uint32_t out[4], const half_t* row) {
#ifdef CUDA_ON_HOST
    cushim::load_matrices(out, row);
#else
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
#endif
}

// The same, transposed: lane 4g + q gets rows 2q and 2q + 1 of column g of each.
DEVICE void load_matrices_transposed(uint32_t out[4], const half_t* row) {
#ifdef CUDA_ON_HOST
    cushim::load_matrices_transposed(out, row);
#else
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
#endif
}

// Two floats as halves, the first in the low bits; each rounded to nearest even.
DEVICE uint32_t two_halves_of(float low, float high) {
#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ >= 800
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return to_half(low).bits | (uint32_t)to_half(high).bits << 16;
#endif
}

// Where column i of the one row lies: so that lanes whose columns are 128 bytes apart meet no bank twice.
DEVICE int padded(int i) { return i + i / 64 * 8; }
