// Matrix product for few token rows (decode): out[t, o] = Σ_i x[t, i]·w[o, i], a warp per output.
//
// Launch: grid (ceil(O / 8), T), 256 threads. The weights are read once per token row, 8 values a lane.
// Accumulates in f32: 8 independent chains a lane, each 1/256 of the sum, then a tree over chains and lanes,
// so the error grows with I/256 + 8 roundings instead of I. Products are of decoded weights and of x as it
// is stored, f32 or f16. ggml: ggml_mul_mat (MUL_MAT); llama.cpp rounds x to the weight's vec_dot_type first.
#include "linear.cuh"

template <class W, class S>
DEVICE void linear_row(const LinearArgs& a) {
    const int o = blockIdx.x * 8 + warp_uniform(threadIdx.x / 32), t = blockIdx.y, lane = threadIdx.x % 32;
    if (o >= a.outputs) return;
    const uint8_t* row = a.weight + (int64_t)o * a.row_bytes;
    const S* x = (const S*)a.x + (int64_t)t * a.columns;

    float acc[8] = {};
#pragma unroll 2
    for (int i = lane * 8; i < a.columns; i += 256) {
        float w[8], v[8];
        W::decode8(row, i, w);
        load8(x + i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) acc[j] = fmaf(w[j], v[j], acc[j]);
    }
    const float sum = ((acc[0] + acc[1]) + (acc[2] + acc[3])) + ((acc[4] + acc[5]) + (acc[6] + acc[7]));
    const float total = warp_sum(sum);
    if (lane == 0) store_output<S>(a, t, o, total);
}

#define LINEAR_ROW(format, suffix)                                           \
    KERNEL(linear_row_##suffix##_f32, LinearArgs, linear_row<format, float>) \
    KERNEL(linear_row_##suffix##_f16, LinearArgs, linear_row<format, half_t>)
FOR_EACH_FORMAT(LINEAR_ROW)
