// Weights decoded and rounded to f16, for the kernels that multiply many rows: out[o, i] = f16(w[o, i]).
//
// Launch: grid (ceil(O·chunks / 64)), 256 threads; a warp decodes eight chunks of rows (lanes.cuh), four lanes each, with the
// bits of linear_few.cu. What lanes have decoded goes through shared memory, so that neighbours store what lies side by
// side. ggml: dequantize_row_*.
#include "lanes.cuh"

enum { UNPACK_WARPS = 8, UNPACK_CHUNKS = 8 };

struct UnpackArgs {
    const uint8_t* weight;  // (O, I) in the weight format
    int64_t row_bytes;      // of one weight row
    void* out;              // (O, I) in f16
    int columns;            // I, a multiple of 8
    int chunks;             // O·row_chunks
    int row_chunks;         // of a row
};

// What a warp has decoded: units of eight weights.
template <class W>
struct UnpackMemory {
    enum { UNITS = Lanes<W>::CHUNK / 8 };
    Words4 units[UNPACK_WARPS][UNPACK_CHUNKS][UNITS];
    // Units exchange places so that few lanes meet in a bank.
    static DEVICE int place(int chunk, int unit) { return unit ^ (unit >> 3 & 3) ^ (chunk & 1) << 2; }
};

template <class W>
DEVICE void unpack(const UnpackArgs& a) {
    typedef UnpackMemory<W> M;
    SHARED(M, memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = (blockIdx.x * UNPACK_WARPS + warp) * UNPACK_CHUNKS;
    Words4(&own)[UNPACK_CHUNKS][M::UNITS] = memory.units[warp];
    const int c = lane / 4, q = lane % 4;
    if (first + c < a.chunks) {
        const int row = (first + c) / a.row_chunks, base = (first + c - row * a.row_chunks) * Lanes<W>::CHUNK;
        Lanes<W> lanes;
        lanes.load(a.weight + row * a.row_bytes, base, q, a.columns);
#pragma unroll Lanes<W>::UNROLL
        for (int j = 0; j < M::UNITS / 4; j++) {
            const int column = Lanes<W>::column(q, j);
            Words4 eight = {};
            if (base + column < a.columns) lanes.group(q, j, eight.v);
            own[c][M::place(c, column / 8)] = eight;
        }
    }
    __syncwarp();
#pragma unroll 4
    for (int n = lane; n < UNPACK_CHUNKS * M::UNITS; n += 32) {
        const int chunk = n / M::UNITS, unit = n % M::UNITS;
        if (first + chunk >= a.chunks) continue;
        const int row = (first + chunk) / a.row_chunks;
        const int i = (first + chunk - row * a.row_chunks) * Lanes<W>::CHUNK + 8 * unit;
        if (i < a.columns) *(Words4*)((half_t*)a.out + (int64_t)row * a.columns + i) = own[chunk][M::place(chunk, unit)];
    }
}

#define UNPACK(format, suffix) KERNEL(unpack_##suffix, UnpackArgs, unpack<format>)
FOR_EACH_FORMAT(UNPACK)
