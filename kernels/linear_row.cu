// Matrix product for few token rows (decode): out[t, o] = Σ_i x[t, i]·w[o, i], a warp per output.
//
// Launch: grid (ceil(O / outputs a block), T, weights), 256 threads; `split` warps share an output, so a block has
// 8/split of them: several where there are few outputs, to have enough of the weights under way. The weights are
// read once per token row, 8 values a lane. Accumulates in f32: 8 independent chains a lane, then a tree over
// chains, lanes and warps, so the error grows with I/256 + 8 roundings instead of I. Products are of decoded
// weights and of x as it is stored, f32 or f16; with f16 values the weights are rounded to f16 as well, as the
// tensor cores of linear_mma.cu take them: a row is the same arithmetic in prefill and decode.
// ggml: ggml_mul_mat (MUL_MAT); llama.cpp rounds x to the weight's vec_dot_type first.
#include "linear.cuh"

struct RowSums {
    float sums[8];
};

template <class W, class S>
DEVICE void linear_row(const LinearArgs& a) {
    SHARED(RowSums, shared);
    const LinearPart& part = a.parts[blockIdx.z];
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32, t = blockIdx.y;
    const int o = blockIdx.x * (8 / a.split) + warp / a.split;
    const S* x = (const S*)a.x + (int64_t)t * a.columns;

    float acc[8] = {};
    if (o < part.outputs) {
        const uint8_t* row = part.weight + (int64_t)o * part.row_bytes;
#pragma unroll W::UNROLL
        for (int i = (warp % a.split * 32 + lane) * 8; i < a.columns; i += 256 * a.split) {
            float w[8], v[8];
            W::decode8(row, i, w);
            load8(x + i, v);
#pragma unroll
            for (int j = 0; j < 8; j++) w[j] = rounded<S>(w[j]);
#pragma unroll
            for (int j = 0; j < 8; j++) acc[j] = fmaf(w[j], v[j], acc[j]);
        }
    }
    const float sum = ((acc[0] + acc[1]) + (acc[2] + acc[3])) + ((acc[4] + acc[5]) + (acc[6] + acc[7]));
    const float total = warp_sum(sum);
    if (lane == 0) shared.sums[warp] = total;
    __syncthreads();
    if (lane == 0 && warp % a.split == 0 && o < part.outputs) {
        float all = total;
        for (int w = 1; w < a.split; w++) all += shared.sums[warp + w];
        store_output<S>(a, part, t, o, all);
    }
}

#define LINEAR_ROW(format, suffix)                                           \
    KERNEL(linear_row_##suffix##_f32, LinearArgs, linear_row<format, float>) \
    KERNEL(linear_row_##suffix##_f16, LinearArgs, linear_row<format, half_t>)
FOR_EACH_FORMAT(LINEAR_ROW)
