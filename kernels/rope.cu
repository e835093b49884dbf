// Rotary position embedding of every head (Su et al., arXiv 2104.09864):
//   (y_a, y_b) = (x_a·cos - x_b·sin, x_a·sin + x_b·cos), angle = position · base^(-2i/dims) / freqs[i]
// for pair i of columns (a, b) = (i, i + dims/2), or (2i, 2i + 1) where interleaved.
//
// Cosines and sines come in a table that the host computes in f64 and rounds once, so the angle carries no
// error of its own (llama.cpp multiplies the angle up in f32). Base, frequency divisors, direction and a
// shifted position are the table's. Queries and keys turn in one launch; keys also go to the KV cache.
// Launch: grid (ceil(T·heads·E/2 / 256), tensors), 256 threads, a pair each, f32.
// ggml: ggml_rope_ext (ROPE), modes NORMAL and NEOX.
#include "rope.cuh"

// One tensor.
struct RopePart {
    const void* x;  // (T, heads, E)
    void* out;      // (T, heads, E)
    void* cache;    // (S, heads, E), or null: the result is appended here
    int64_t heads;
};

struct RopeArgs {
    RopePart parts[2];   // by blockIdx.y
    const float* table;  // (positions, dims/2, 2): cosine, sine
    const int* first;    // position of row 0, (1,)
    int rows;            // T
    int head_width;      // E
    int dims;            // leading columns that turn; the others are copied
    int interleaved;     // pairs (2i, 2i + 1)
    int times;           // how often it is applied: 1 in a healthy model
    int in_step;         // positions counted from the start of the step, by mistake
    int cache_f16;       // whether the cache is f16, else f32
};

template <class S>
DEVICE void put(const RopeArgs& a, const RopePart& part, int64_t i, float y) {
    y = rounded<S>(y);
    store((S*)part.out + i, y);
    if (!part.cache) return;
    const int64_t at = *a.first * part.heads * a.head_width + i;
    if (a.cache_f16) store((half_t*)part.cache + at, y);
    else ((float*)part.cache)[at] = y;
}

template <class S>
DEVICE void rope(const RopeArgs& a) {
    const RopePart part = blockIdx.y == 0 ? a.parts[0] : a.parts[1];
    const int64_t index = (int64_t)blockIdx.x * 256 + threadIdx.x;
    const int pairs = (a.head_width + 1) / 2, turned = a.dims / 2;
    if (index >= a.rows * part.heads * pairs) return;
    const int i = index % pairs;
    const int64_t head = index / pairs, at = head * a.head_width;
    const int t = head / part.heads;
    const S* x = (const S*)part.x + at;

    if (i >= turned) {  // columns beyond `dims`, two by two
        const int c = 2 * i;
        put<S>(a, part, at + c, to_float(x[c]));
        if (c + 1 < a.head_width) put<S>(a, part, at + c + 1, to_float(x[c + 1]));
        return;
    }
    const int ca = a.interleaved ? 2 * i : i, cb = a.interleaved ? 2 * i + 1 : i + turned;
    const int64_t position = a.in_step ? t : *a.first + t;
    const float* angle = a.table + (position * turned + i) * 2;
    const float cosine = angle[0], sine = angle[1];
    float xa = to_float(x[ca]), xb = to_float(x[cb]);
    for (int k = 0; k < a.times; k++) {
        const Rotated r = rotate(xa, xb, cosine, sine);
        xa = r.a;
        xb = r.b;
    }
    put<S>(a, part, at + ca, xa);
    put<S>(a, part, at + cb, xb);
}

KERNEL(rope_f32, RopeArgs, rope<float>)
KERNEL(rope_f16, RopeArgs, rope<half_t>)
