// Greedy decoding without the host: the token of the largest logit, the first one of several, is what the next step
// computes, one position further on. A NaN is never the largest; with nothing but NaN it is token 0.
//
// Launch: one block, 1024 threads. ggml: ggml_argmax (ARGMAX), or llama.cpp's greedy sampler.
#include "common.cuh"

struct NextArgs {
    const float* logits;  // (V,)
    int* step;            // (2,) position and token of the step, then of the next one
    uint32_t* tokens;     // (S,) the token at each position
    int vocab;            // V
};

struct Candidate {
    float value;
    int token;
};

DEVICE Candidate better(const Candidate& a, const Candidate& b) {
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

struct NextMemory {
    Candidate best[32];
};

DEVICE Candidate best_of_warp(Candidate best) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        Candidate other;
        other.value = __shfl_xor_sync(FULL_WARP, best.value, d);
        other.token = __shfl_xor_sync(FULL_WARP, best.token, d);
        best = better(best, other);
    }
    return best;
}

DEVICE void choose_next(const NextArgs& a) {
    enum { AT_ONCE = 8 };  // loads under way
    SHARED(NextMemory, memory);
    Candidate best = {-INFINITY_F, a.vocab};
    for (int base = threadIdx.x; base < a.vocab; base += AT_ONCE * blockDim.x) {
        float x[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = base + n * blockDim.x;
            x[n] = i < a.vocab ? a.logits[i] : -INFINITY_F;
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = base + n * blockDim.x;
            const Candidate here = {x[n], i};
            if (i < a.vocab) best = better(best, here);
        }
    }
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) memory.best[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const Candidate none = {-INFINITY_F, a.vocab};
    best = best_of_warp(threadIdx.x < blockDim.x / 32 ? memory.best[threadIdx.x] : none);
    if (threadIdx.x > 0) return;
    const int position = a.step[0] + 1, token = best.token < a.vocab ? best.token : 0;
    a.step[0] = position;
    a.step[1] = token;
    a.tokens[position] = (uint32_t)token;
}

KERNEL_SIZED(next_token, NextArgs, 1024, 1, choose_next)
