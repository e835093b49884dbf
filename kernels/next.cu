// Greedy decoding without the host: the token of the largest logit, the first one of several, is what the next step
// computes, one position further on. A NaN is never the largest; with nothing but NaN it is token 0.
//
// Launch: at most 1024 blocks of 1024 threads. Each leaves the best of its logits, and the last one to do so chooses: of a
// set of candidates the best is the same in any order. ggml: ggml_argmax (ARGMAX), or llama.cpp's greedy sampler.
#include "common.cuh"

struct Candidate {
    float value;
    int token;
};

struct NextArgs {
    const float* logits;  // (V,)
    int* step;            // (2,) position and token of the step, then of the next one
    uint32_t* tokens;     // (S,) the token at each position
    Candidate* best;      // (blocks,)
    uint32_t* arrived;    // blocks that have left their best; 0 at first
    int vocab;            // V
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

// The best of a block's candidates, for its first thread.
DEVICE Candidate best_of_block(Candidate best, const Candidate& none, NextMemory& memory) {
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) memory.best[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return none;
    return best_of_warp(threadIdx.x < blockDim.x / 32 ? memory.best[threadIdx.x] : none);
}

// Leaves this block's best for the others; whether it is the last block to do so. (Barriers between blocks: the CPU runs
// blocks one after another, so that no test there can miss them.)
DEVICE bool leave_best(const NextArgs& a, const Candidate& best) {
    bool last = false;
    if (threadIdx.x == 0) {
        a.best[blockIdx.x] = best;
        __threadfence();
        last = atomicAdd(a.arrived, 1u) == gridDim.x - 1;
        if (last) *a.arrived = 0;  // for the next launch
    }
    last = __syncthreads_or(last) != 0;
    __threadfence();
    return last;
}

DEVICE void choose_next(const NextArgs& a) {
    enum { AT_ONCE = 4 };  // loads under way
    SHARED(NextMemory, memory);
    const Candidate none = {-INFINITY_F, a.vocab};
    Candidate best = none;
    const int stride = gridDim.x * blockDim.x;
    for (int base = blockIdx.x * blockDim.x + threadIdx.x; base < a.vocab; base += AT_ONCE * stride) {
        float x[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = base + n * stride;
            x[n] = i < a.vocab ? a.logits[i] : -INFINITY_F;
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = base + n * stride;
            const Candidate here = {x[n], i};
            if (i < a.vocab) best = better(best, here);
        }
    }
    best = best_of_block(best, none, memory);
    if (!leave_best(a, best)) return;
    Candidate other = none;
    if (threadIdx.x < gridDim.x) {
        other.value = load_fresh(&a.best[threadIdx.x].value);
        other.token = *(const volatile int*)&a.best[threadIdx.x].token;
    }
    best = best_of_block(other, none, memory);
    if (threadIdx.x > 0) return;
    const int position = a.step[0] + 1, token = best.token < a.vocab ? best.token : 0;
    a.step[0] = position;
    a.step[1] = token;
    a.tokens[position] = (uint32_t)token;
}

KERNEL_SIZED(next_token, NextArgs, 1024, 1, choose_next)
