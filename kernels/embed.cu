// Token embedding: out[t, d] = table[token[t], d].
//
// Launch: grid (ceil(D / 2048), T), 256 threads; a thread decodes 8 weights. No accumulation.
// ggml: ggml_get_rows (GET_ROWS), dequantize_row_*.
#include "quants.cuh"

struct EmbedArgs {
    const uint8_t* table;    // (V, D) in the weight format
    int64_t row_bytes;       // of one table row
    const uint32_t* tokens;  // (T,), each < V
    void* out;               // (T, D)
    int width;               // D, a multiple of 8
};

template <class W, class S>
DEVICE void embed(const EmbedArgs& a) {
    const int t = blockIdx.y, i = (blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= a.width) return;
    float w[8];
    W::decode8(a.table + a.tokens[t] * a.row_bytes, i, w);
    S* out = (S*)a.out + (int64_t)t * a.width;
#pragma unroll
    for (int j = 0; j < 8; j++) store(out + i + j, w[j]);
}

#define EMBED(format, suffix)                                     \
    KERNEL(embed_##suffix##_f32, EmbedArgs, embed<format, float>) \
    KERNEL(embed_##suffix##_f16, EmbedArgs, embed<format, half_t>)
FOR_EACH_FORMAT(EMBED)
