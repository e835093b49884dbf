// KV cache: cache[first + t, c] = x[t, c], rounded to the type of the cache.
//
// Launch: grid (ceil(T·K·E / 256)), 256 threads, one element each. ggml: ggml_set_rows (SET_ROWS), ggml_cpy.
#include "common.cuh"

struct CacheArgs {
    const void* x;     // (T, K·E), a checkpoint
    void* cache;       // (S, K·E)
    const int* first;  // position of row 0, (1,)
    int64_t n;         // T·K·E
    int width;         // K·E
};

template <class S, class KV>
DEVICE void cache(const CacheArgs& a) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n) return;
    store((KV*)a.cache + (int64_t)*a.first * a.width + i, to_float(((const S*)a.x)[i]));
}

KERNEL(cache_f32_f32, CacheArgs, cache<float, float>)
KERNEL(cache_f32_f16, CacheArgs, cache<float, half_t>)
KERNEL(cache_f16_f16, CacheArgs, cache<half_t, half_t>)
