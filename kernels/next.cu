// Greedy decoding without the host: the token of the largest logit, the first one of several, is what the next step
// computes, one position further on. A NaN is never the largest; with nothing but NaN it is token 0.
//
// Launch: grid (blocks), 256 threads; the blocks take the logits by turns, and the last one to arrive chooses among what each
// has found. ggml: ggml_argmax (ARGMAX), or llama.cpp's greedy sampler.
#include "common.cuh"

struct Candidate {
    float value;
    int token;
};

struct NextArgs {
    const float* logits;  // (V,)
    int* step;            // (2,) position and token of the step, then of the next one
    uint32_t* tokens;     // (S,) the token at each position
    Candidate* best;      // (blocks,) of each block
    uint32_t* arrived;    // how many have found theirs: 0 before and after
    int vocab;            // V
};

DEVICE Candidate better(const Candidate& a, const Candidate& b) {
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

struct NextMemory {
    Candidate best[2][8];
};

// The best of a block's candidates, in thread 0. `scratch`: (warps,).
DEVICE Candidate best_of_block(Candidate best, Candidate none, Candidate* scratch) {
    for (int round = 0; round < 2; round++) {
#pragma unroll
        for (int d = 16; d > 0; d /= 2) {
            Candidate other;
            other.value = __shfl_xor_sync(FULL_WARP, best.value, d);
            other.token = __shfl_xor_sync(FULL_WARP, best.token, d);
            best = better(best, other);
        }
        if (round == 1) return best;
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = best;
        __syncthreads();
        best = threadIdx.x < blockDim.x / 32 ? scratch[threadIdx.x] : none;
    }
    return best;
}

DEVICE void choose_next(const NextArgs& a) {
    enum { AT_ONCE = 4 };  // loads under way
    SHARED(NextMemory, memory);
    const Candidate none = {-INFINITY_F, a.vocab};
    Candidate best = none;
    const int threads = gridDim.x * blockDim.x;
    for (int base = blockIdx.x * blockDim.x + threadIdx.x; base < a.vocab; base += AT_ONCE * threads) {
        float x[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) x[n] = base + n * threads < a.vocab ? a.logits[base + n * threads] : -INFINITY_F;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const Candidate here = {x[n], base + n * threads};
            if (here.token < a.vocab) best = better(best, here);
        }
    }
    best = best_of_block(best, none, memory.best[0]);
    if (threadIdx.x == 0) a.best[blockIdx.x] = best;
    if (!is_last(a.arrived, gridDim.x)) return;
    best = none;
    for (int block = threadIdx.x; block < (int)gridDim.x; block += blockDim.x) {
        const Candidate here = {load_fresh(&a.best[block].value), load_fresh(&a.best[block].token)};
        best = better(best, here);
    }
    best = best_of_block(best, none, memory.best[1]);
    if (threadIdx.x > 0) return;
    const int position = a.step[0] + 1, token = best.token < a.vocab ? best.token : 0;
    a.step[0] = position;
    a.step[1] = token;
    a.tokens[position] = (uint32_t)token;
}

KERNEL(next_token, NextArgs, choose_next)
