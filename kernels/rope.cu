// Rotary position embedding of every head (Su et al., arXiv 2104.09864):
//   (y_a, y_b) = (x_a·cos - x_b·sin, x_a·sin + x_b·cos), angle = position · base^(-2i/dims) / freqs[i]
// for pair i of columns (a, b) = (i, i + dims/2), or (2i, 2i + 1) where interleaved.
//
// Cosines and sines come in a table that the host computes in f64 and rounds once, so the angle carries no
// error of its own (llama.cpp multiplies the angle up in f32). Base, frequency divisors, direction and a
// shifted position are the table's. Launch: grid (ceil(T·heads·E/2 / 256)), 256 threads, a pair each, f32.
// ggml: ggml_rope_ext (ROPE), modes NORMAL and NEOX.
#include "common.cuh"

struct RopeArgs {
    const void* x;       // (T, heads, E)
    const float* table;  // (positions, dims/2, 2): cosine, sine
    const int* first;    // position of row 0, (1,)
    void* out;           // (T, heads, E)
    int rows;            // T
    int heads;
    int head_width;      // E
    int dims;            // leading columns that turn; the others are copied
    int interleaved;     // pairs (2i, 2i + 1)
    int times;           // how often it is applied: 1 in a healthy model
    int in_step;         // positions counted from the start of the step, by mistake
};

template <class S>
DEVICE void rope(const RopeArgs& a) {
    const int64_t index = (int64_t)blockIdx.x * 256 + threadIdx.x;
    const int pairs = (a.head_width + 1) / 2, turned = a.dims / 2;
    if (index >= (int64_t)a.rows * a.heads * pairs) return;
    const int i = index % pairs;
    const int64_t head = index / pairs;
    const int t = head / a.heads;
    const S* x = (const S*)a.x + head * a.head_width;
    S* out = (S*)a.out + head * a.head_width;

    if (i >= turned) {  // columns beyond `dims`, two by two
        const int c = 2 * i;
        out[c] = x[c];
        if (c + 1 < a.head_width) out[c + 1] = x[c + 1];
        return;
    }
    const int ca = a.interleaved ? 2 * i : i, cb = a.interleaved ? 2 * i + 1 : i + turned;
    const int64_t position = a.in_step ? t : *a.first + t;
    const float* angle = a.table + (position * turned + i) * 2;
    const float cosine = angle[0], sine = angle[1];
    float xa = to_float(x[ca]), xb = to_float(x[cb]);
    for (int k = 0; k < a.times; k++) {
        const float ya = xa * cosine - xb * sine;
        xb = xa * sine + xb * cosine;
        xa = ya;
    }
    store(out + ca, xa);
    store(out + cb, xb);
}

KERNEL(rope_f32, RopeArgs, rope<float>)
KERNEL(rope_f16, RopeArgs, rope<half_t>)
