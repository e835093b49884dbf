// What every kernel stands on: storage types, vector loads, warp and block reductions.
//
// The sources are written in the subset that NVRTC, nvcc and a plain C++17 compiler accept: no header of
// CUDA is included, inline PTX stands beside a host version, shared memory is one SHARED struct a kernel.
// T token rows, D model width, H query heads, K key/value heads, E head width, F feed-forward width,
// V vocabulary, S cached positions; shapes have the slowest axis first.
#pragma once

#ifdef CUDA_ON_HOST
#include "host/cuda_on_host.h"
#else
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
// One shared-memory struct a kernel.
#define SHARED(type, name) __shared__ type name
// The one struct in dynamic shared memory: of as many bytes as the launch says.
#define DYNAMIC(type, name)                              \
    extern __shared__ __align__(16) uint8_t dynamic_[];  \
    type& name = *reinterpret_cast<type*>(dynamic_)
// Defines the kernel `name`, which runs `body(args)`. Every kernel takes one struct by value.
#define KERNEL(name, args_type, ...)                                             \
    extern "C" __global__ void __launch_bounds__(256) name(const args_type args) { \
        let_next_begin();                                                        \
        wait_for_last();                                                         \
        __VA_ARGS__(args);                                                       \
    }
// The same with a block of at most `threads` and registers for so many blocks at once.
#define KERNEL_SIZED(name, args_type, threads, blocks, ...)                                      \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const args_type args) { \
        let_next_begin();                                                                        \
        wait_for_last();                                                                         \
        __VA_ARGS__(args);                                                                       \
    }
// The same for a body that begins before the kernel ahead of it in the stream has ended: it calls `wait_for_last`
// itself, before it reads or writes what other kernels write or read. A block has at most `threads`; registers are
// left for so many blocks at once.
#define KERNEL_AHEAD(name, args_type, threads, blocks, ...)                                    \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const args_type args) { \
        let_next_begin();                                                                      \
        __VA_ARGS__(args);                                                                     \
    }
#endif

#define DEVICE __device__ __forceinline__

// Programmatic dependent launch (Hopper and later): the next kernel of the stream may begin now; and this one waits
// until the kernel ahead of it has ended and its results are seen. Nothing elsewhere, where kernels do not overlap.
__device__ inline void let_next_begin() {
#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_last() {
#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#define FULL_WARP 0xffffffffu
#define INFINITY_F __int_as_float(0x7f800000)

// Asks for bytes that a later kernel reads to be brought to the second cache; each block for its share. (Hopper and
// later: one instruction for a whole piece.)
DEVICE void prefetch(const void* from, int64_t bytes) {
#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ >= 900
    if (threadIdx.x > 0) return;
    const int64_t piece = 8192, blocks = (int64_t)gridDim.x * gridDim.y * gridDim.z;
    const int64_t block = blockIdx.x + gridDim.x * (blockIdx.y + (int64_t)gridDim.y * blockIdx.z);
    for (int64_t at = block * piece; at < bytes; at += blocks * piece) {
        const uint32_t size = (uint32_t)min((int)piece, (int)(bytes - at));
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"((const char*)from + at), "r"(size) : "memory");
    }
#endif
}

// ---------------------------------------------------------------- storage types

// IEEE binary16, converted by the hardware (round to nearest even).
struct half_t {
    uint16_t bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(half_t x) {
#ifdef CUDA_ON_HOST
    return cushim::half_to_float(x.bits);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
    return f;
#endif
}
DEVICE half_t to_half(float x) {
    half_t h;
#ifdef CUDA_ON_HOST
    h.bits = cushim::float_to_half(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
#endif
    return h;
}
DEVICE void store(float* p, float x) { *p = x; }
DEVICE void store(half_t* p, float x) { *p = to_half(x); }
// x as it is after it was stored.
template <class S>
DEVICE float rounded(float x) {
    S s;
    store(&s, x);
    return to_float(s);
}
// bfloat16 is the upper half of a float.
DEVICE float bf16_to_float(uint16_t bits) { return __int_as_float((int)((uint32_t)bits << 16)); }

// ---------------------------------------------------------------- eight values at a time

struct alignas(16) Half8 {
    half_t v[8];
};
struct alignas(16) Float4 {
    float v[4];
};
// Eight halves, two to a word: the lower one comes first.
struct alignas(16) Words4 {
    uint32_t v[4];
};
struct Halves {
    float low, high;
};
DEVICE Halves halves(uint32_t two) {
    Halves of;
#ifdef CUDA_ON_HOST
    of = {cushim::half_to_float((uint16_t)(two & 0xffffu)), cushim::half_to_float((uint16_t)(two >> 16))};
#else
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(of.low), "=f"(of.high) : "r"(two));
#endif
    return of;
}
DEVICE float low_half(uint32_t two) { return halves(two).low; }
DEVICE float high_half(uint32_t two) { return halves(two).high; }
// The low halves of two words, and their high ones.
DEVICE uint32_t both_low(uint32_t a, uint32_t b) {
#ifdef CUDA_ON_HOST
    return (a & 0xffffu) | b << 16;
#else
    return __byte_perm(a, b, 0x5410);
#endif
}
DEVICE uint32_t both_high(uint32_t a, uint32_t b) {
#ifdef CUDA_ON_HOST
    return a >> 16 | (b & 0xffff0000u);
#else
    return __byte_perm(a, b, 0x7632);
#endif
}

// out[j] = p[j], by loads of 16 bytes: p is aligned to them.
DEVICE void load8(const float* p, float out[8]) {
    const Float4 a = *(const Float4*)p, b = *(const Float4*)(p + 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        out[j] = a.v[j];
        out[4 + j] = b.v[j];
    }
}
DEVICE void load8(const half_t* p, float out[8]) {
    const Half8 h = *(const Half8*)p;
#pragma unroll
    for (int j = 0; j < 8; j++) out[j] = to_float(h.v[j]);
}

// p[j] = x[j], by stores of 16 bytes.
DEVICE void store8(float* p, const float x[8]) {
    Float4 a, b;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a.v[j] = x[j];
        b.v[j] = x[4 + j];
    }
    *(Float4*)p = a;
    *(Float4*)(p + 4) = b;
}
DEVICE void store8(half_t* p, const float x[8]) {
    Half8 h;
#pragma unroll
    for (int j = 0; j < 8; j++) h.v[j] = to_half(x[j]);
    *(Half8*)p = h;
}

// The first multiple of `alignment`, a power of 2, in shared memory from `p` on.
DEVICE uint8_t* aligned(uint8_t* p, int alignment) {
#ifdef CUDA_ON_HOST
    const uint64_t at = (uint64_t)p;
#else
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(p);
#endif
    return p + (-at & (alignment - 1));
}

// What another block of this kernel has stored: not from the first cache.
DEVICE float load_fresh(const float* p) { return *(const volatile float*)p; }
DEVICE int load_fresh(const int* p) { return *(const volatile int*)p; }
DEVICE Float4 load_fresh4(const float* p) {
    Float4 x;
#ifdef CUDA_ON_HOST
    x = *(const Float4*)p;
#else
    asm volatile("ld.volatile.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "l"(p)
                 : "memory");
#endif
    return x;
}

// Copies of 16 bytes from global to shared memory that run on while the thread does. A thread's copies are
// counted in groups; `async_wait<N>` waits for all of its groups but the last N. A barrier must follow before
// other threads read what has arrived. Turing has no such thing and copies at once.
DEVICE void async_copy(void* shared, const void* global) {
#ifdef CUDA_ON_HOST
    cushim::async_copy(shared, global);
#elif __CUDA_ARCH__ >= 800
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
    *(Half8*)shared = *(const Half8*)global;
#endif
}
// The same where `exists`; zeros where it does not.
DEVICE void async_copy_or_zero(void* shared, const void* global, bool exists) {
#ifdef CUDA_ON_HOST
    if (exists) cushim::async_copy(shared, global);
    else *(Half8*)shared = Half8{};
#elif __CUDA_ARCH__ >= 800
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(exists ? 16 : 0) : "memory");
#else
    const Half8 zero = {};
    *(Half8*)shared = exists ? *(const Half8*)global : zero;
#endif
}
DEVICE void async_group() {
#ifdef CUDA_ON_HOST
    cushim::async_group();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N>
DEVICE void async_wait() {
#ifdef CUDA_ON_HOST
    cushim::async_wait(N);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Whether this block is the last of so many to have come here: then it sees what the others have stored before. `arrived` is
// 0 before and after a launch. (These are barriers between blocks: the CPU runs blocks one after another, so that no test
// there can miss them.)
DEVICE bool is_last(uint32_t* arrived, int blocks) {
    __syncthreads_or(0);
    bool last = false;
    if (threadIdx.x == 0) {
        __threadfence();  // of what all threads here have stored, since they are past the barrier
        last = atomicAdd(arrived, 1u) == (uint32_t)blocks - 1;
        if (last) *arrived = 0;  // for the next launch
        __threadfence();
    }
    return __syncthreads_or(last) != 0;
}

// ---------------------------------------------------------------- reductions, in a fixed order

template <class X>
DEVICE X warp_sum(X x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(FULL_WARP, x, d);
    return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, d));
    return x;
}

// The upper half of a product of 64 bits.
DEVICE uint32_t upper_half(uint32_t a, uint32_t b) {
#ifdef CUDA_ON_HOST
    return (uint32_t)((uint64_t)a * b >> 32);
#else
    return __umulhi(a, b);
#endif
}

// The same value in all lanes, which tells the compiler so: it drops its provisions for diverged warps.
DEVICE int warp_uniform(int x) { return __shfl_sync(FULL_WARP, x, 0); }

// Sum over the threads of a block of whole warps; every thread gets it. `scratch` may be reused at once.
DEVICE double block_sum(double x, double scratch[32]) {
    const int warps = blockDim.x / 32;
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; w < warps; w++) sum += scratch[w];
    __syncthreads();
    return sum;
}
