// What kernels/warpgroup.cuh has of Hopper, on the CPU: barriers in shared memory, tiles that come to several blocks of a
// cluster, and products of a warpgroup. Products are computed when they are waited for, no earlier, so that a tile that is
// given up too soon gives wrong values; a tile is there as soon as it is asked for, in place of what nobody may read any more.
#pragma once
#include "cuda_on_host.h"

namespace cushim {

// A barrier in shared memory, in its eight bytes.
struct BarrierState {
    int32_t bytes;  // expected in this phase and not yet here
    uint8_t arrivals, pending, phase;
};
static_assert(sizeof(BarrierState) <= 8, "as in memory");

inline BarrierState& state_of(void* barrier) { return *reinterpret_cast<BarrierState*>(barrier); }
inline void settle(BarrierState& state) {
    if (state.pending > 0 || state.bytes != 0) return;
    state.phase ^= 1;
    state.pending = state.arrivals;
}
inline void barrier_init(void* barrier, int arrivals) { state_of(barrier) = {0, (uint8_t)arrivals, (uint8_t)arrivals, 0}; }
inline void barrier_arrive(void* barrier) {
    state_of(barrier).pending--;
    settle(state_of(barrier));
}
inline void barrier_expect(void* barrier, int bytes) {
    state_of(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(void* barrier, int parity) {
    machine->current->is_over = [=] { return state_of(barrier).phase != parity; };
    yield(AT_SHARED_BARRIER);
}

inline void cluster_wait() { yield(AT_CLUSTER_BARRIER); }
// The same place in the shared memory of another block.
template <class T>
T* in_block(T* own, int rank) {
    return (T*)(machine->memory[rank].bytes + ((const char*)own - own_memory()));
}

// Where a byte of a tile lies: units of 16 bytes are exchanged within every 128, by the number of the 128 in 1024.
inline size_t exchanged(size_t at) { return at ^ (at >> 7 & 7) << 4; }

template <class HALF, class BARRIER>
void bring_tile(const HALF* matrix, int rows, int columns, int box_rows, HALF* to, BARRIER* arrived, int column, int row, int blocks) {
    const size_t at = (const char*)to - own_memory();
    for (int rank = 0; blocks >> rank; rank++) {
        if (!(blocks >> rank & 1)) continue;
        char* memory = machine->memory[rank].bytes;
        for (int r = 0; r < box_rows; r++)
            for (int c = 0; c < 64; c++) {
                HALF value = {};
                if (row + r < rows && column + c < columns) value = matrix[(size_t)(row + r) * columns + column + c];
                memcpy(memory + exchanged(at + 128 * r + 2 * c), &value, 2);
            }
        BarrierState& state = state_of(in_block(arrived, rank));
        state.bytes -= 128 * box_rows;
        settle(state);
    }
}

// Sixteen columns of a row of a tile.
struct Sixteen {
    float v[16];
    Sixteen(uint64_t tile, int row) {
        const char* memory = own_memory();
        for (int k = 0; k < 16; k++) {
            uint16_t bits;
            memcpy(&bits, memory + exchanged((const char*)tile - memory + 128 * row + 2 * k), 2);
            v[k] = half_to_float(bits);
        }
    }
};
// wgmma m64nNk16 with f16 operands and f32 accumulation, in f64 rounded once.
inline void products(float* d, int n, uint64_t x, uint64_t w) {
    const int thread = machine->current->thread.x, lane = thread % 32, row = thread % 128 / 32 * 16 + lane / 4;
    machine->current->products.back().push_back([=] {
        const Sixteen xs[2] = {{x, row}, {x, row + 8}};
        for (int j = 0; j < n / 8; j++)
            for (int side = 0; side < 2; side++) {
                const Sixteen ws(w, 8 * j + lane % 4 * 2 + side);
                for (int half = 0; half < 2; half++) {
                    double sum = d[4 * j + 2 * half + side];
                    for (int k = 0; k < 16; k++) sum += double(xs[half].v[k]) * ws.v[k];
                    d[4 * j + 2 * half + side] = sum;
                }
            }
    });
}
inline void products_group() { machine->current->products.emplace_back(); }
inline void products_wait(size_t but_last) {
    finish_groups(machine->current->products, but_last, [](const auto& product) { product(); });
    warp_op(SYNC, 0xffffffffu, 0, 0);  // a warp waits as one
}

}  // namespace cushim
