// What Hopper has for matrix products (PTX ISA: cp.async.bulk.tensor, mbarrier, wgmma, cluster): tiles that the copy engine
// brings to the shared memory of several blocks at once, barriers in shared memory that count its bytes, and products of a
// whole warpgroup (four warps), whose operands are read from shared memory while the threads go on.
//
// A tile in shared memory has rows of 64 halves, 128 bytes, and begins at a multiple of 1024; unit u of 16 bytes of row r
// lies at u ^ r % 8, so that no bank is met twice. Other architectures have no such thing, and no kernel that includes this.
#pragma once
#include "common.cuh"

#if defined(CUDA_ON_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WARPGROUPS 1
#endif

enum { WARPGROUP = 128, TILE_COLUMNS = 64, TILE_ROW_BYTES = 128, TILE_ALIGNMENT = 1024 };

// A matrix in global memory, as the copy engine wants it described: (rows, columns) halves, of which it brings so many rows
// and 64 columns at a time, zeros beyond the matrix. The host encodes it; the CPU takes it as it is.
struct alignas(64) TensorMap {
#ifdef CUDA_ON_HOST
    const half_t* matrix;
    uint32_t rows, columns, box_rows, rest[27];
#else
    uint32_t words[32];
#endif
};
static_assert(sizeof(TensorMap) == 128, "as the driver has it");

#ifdef CUDA_ON_HOST
#include "host/hopper_on_host.h"
// A block in a cluster of more than one, with its place in it; and what tells them apart.
#define KERNEL_CLUSTER(name, args_type, threads, blocks, x, y, ...)                                       \
    static cushim::Register register_##name(                                                              \
        #name, sizeof(args_type), [](const void* p) { __VA_ARGS__(*(const args_type*)p); }, {x, y, 1});
#elif defined(HAS_WARPGROUPS)
// The same for a body that is launched in clusters of x·y blocks, and whose struct stays where the launch puts it.
#define KERNEL_CLUSTER(name, args_type, threads, blocks, x, y, ...)                         \
    extern "C" __global__ void __cluster_dims__(x, y, 1) __launch_bounds__(threads, blocks) \
        name(const __grid_constant__ args_type args) {                                      \
        let_next_begin();                                                                   \
        __VA_ARGS__(args);                                                                  \
    }
#else
#define KERNEL_CLUSTER(...)
#endif

#ifdef HAS_WARPGROUPS

// ---------------------------------------------------------------- clusters

// A barrier of all threads of the cluster, in two halves; `cluster_release` is for those who have written what others read
// after `cluster_wait`, and takes a microsecond longer.
DEVICE void cluster_arrive() {
#ifndef CUDA_ON_HOST
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_release() {
#ifndef CUDA_ON_HOST
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#ifdef CUDA_ON_HOST
    cushim::cluster_wait();
#else
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Four floats at the place in block `rank`'s shared memory where `own` is in this one's.
DEVICE Float4 load_of_block(const float* own, int rank) {
    Float4 x;
#ifdef CUDA_ON_HOST
    x = *(const Float4*)cushim::in_block(own, rank);
#else
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "r"(address)
                 : "memory");
#endif
    return x;
}

// ---------------------------------------------------------------- barriers in shared memory

// Phases follow each other: one is over when so many have arrived and all expected bytes are here. Phase n has parity n % 2.
// (Arrivals order nothing beyond the block: a fence of the cluster would take a microsecond, and what is handed over is
// touched by the copy engine and the tensor cores alone, which is waited for.)
struct alignas(8) SharedBarrier {
    uint32_t words[2];

    DEVICE void init(int arrivals) {
#ifdef CUDA_ON_HOST
        cushim::barrier_init(this, arrivals);
#else
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
#endif
    }
    // Arrives, and expects so many bytes in this phase.
    DEVICE void expect(int bytes) {
#ifdef CUDA_ON_HOST
        cushim::barrier_expect(this, bytes);
#else
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
    }
    // Arrives at the barrier in this place of block `rank` of the cluster.
    DEVICE void arrive_at(int rank) {
#ifdef CUDA_ON_HOST
        cushim::barrier_arrive(cushim::in_block(this, rank));
#else
        asm volatile(
            "{\n.reg .b32 to;\nmapa.shared::cluster.u32 to, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [to];\n}" ::"r"(address()),
            "r"(rank)
            : "memory");
#endif
    }
    // Waits until the phase of this parity is over; the one before the first has parity 1.
    DEVICE void wait(int parity) {
#ifdef CUDA_ON_HOST
        cushim::barrier_wait(this, parity);
#else
        asm volatile(
            "{\n.reg .pred done;\nagain:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n}" ::"r"(address()),
            "r"(parity)
            : "memory");
#endif
    }
#ifndef CUDA_ON_HOST
    DEVICE uint32_t address() const { return (uint32_t)__cvta_generic_to_shared(this); }
#endif
};
// What was initialised is seen by the other blocks and the copy engine, after a barrier of the cluster.
DEVICE void barriers_are_ready() {
#ifndef CUDA_ON_HOST
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// ---------------------------------------------------------------- the copy engine

// Asks for rows from `row` on and columns from `column` on, to `to` in the shared memory of every block whose bit `blocks`
// has, or of this one alone; each one's `arrived` counts the bytes.
template <bool TO_OTHERS>
DEVICE void bring_tile(const TensorMap& map, half_t* to, SharedBarrier& arrived, int column, int row, int blocks) {
#ifdef CUDA_ON_HOST
    cushim::bring_tile(map.matrix, map.rows, map.columns, map.box_rows, to, &arrived, column, row, blocks);
#else
    const uint32_t place = (uint32_t)__cvta_generic_to_shared(to);
    if (TO_OTHERS)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
            "[%4], %5;" ::"r"(place),
            "l"(&map), "r"(column), "r"(row), "r"(arrived.address()), "h"((uint16_t)blocks)
            : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(place),
                     "l"(&map), "r"(column), "r"(row), "r"(arrived.address())
                     : "memory");
#endif
}
// Lets the copy engine look at a map before it is needed.
DEVICE void prefetch_map(const TensorMap& map) {
#ifndef CUDA_ON_HOST
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// ---------------------------------------------------------------- products of a warpgroup

// Sixteen columns, from 16·k on, of a tile.
DEVICE uint64_t columns_of(const half_t* tile, int k) {
#ifdef CUDA_ON_HOST
    return (uint64_t)(tile + 16 * k);
#else
    // Start, then eight rows 1024 bytes further on, in units of 16 bytes; and that units are exchanged within 128 bytes.
    const uint32_t start = ((uint32_t)__cvta_generic_to_shared(tile) + 32 * k) >> 4;
    return (uint64_t)(start & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(TILE_ALIGNMENT >> 4) << 32 | (uint64_t)1 << 62;
#endif
}
// Before the first product, and after registers of sums were touched.
DEVICE void products_begin() {
#ifndef CUDA_ON_HOST
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Closes a group of products.
DEVICE void products_group() {
#ifdef CUDA_ON_HOST
    cushim::products_group();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits for all groups but the last N.
template <int N>
DEVICE void products_wait() {
#ifdef CUDA_ON_HOST
    cushim::products_wait(N);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

// d += a·b for a of 64 x 16 and b of N x 16, f16 with f32 accumulation. Lane 4g + q of warp w holds, for each eight outputs
// from 8j on: d[4j..] = (16w + g, 8j + 2q), (the same, 8j + 2q + 1), (16w + g + 8, 8j + 2q), (the same, 8j + 2q + 1).
template <int N>
struct Products;

#ifdef CUDA_ON_HOST
#define PRODUCTS(n, names, a, b, ...)                                                                             \
    template <>                                                                                                   \
    struct Products<n> {                                                                                          \
        static DEVICE void add(float (&d)[n / 2], uint64_t x, uint64_t w) { cushim::products(d, n, x, w); }       \
    };
#else
#define PRODUCTS(n, names, a, b, ...)                                                                             \
    template <>                                                                                                   \
    struct Products<n> {                                                                                          \
        static DEVICE void add(float (&d)[n / 2], uint64_t x, uint64_t w) {                                       \
            asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n       \
                         "k16.f32.f16.f16 {" names "}, %" #a ", %" #b ", add, 1, 1, 0, 0;\n}"                     \
                         : __VA_ARGS__                                                                            \
                         : "l"(x), "l"(w));                                                                       \
        }                                                                                                         \
    };
#endif
#define SUMS8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(i) SUMS8(i), SUMS8(i + 8), SUMS8(i + 16), SUMS8(i + 24)
#define NAMES32                                                                                                          \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
    "%31"
#define NAMES64                                                                                                         \
    NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
            "%58,%59,%60,%61,%62,%63"
#define NAMES80 NAMES64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
PRODUCTS(64, NAMES32, 32, 33, SUMS32(0))
PRODUCTS(128, NAMES64, 64, 65, SUMS32(0), SUMS32(32))
PRODUCTS(160, NAMES80, 80, 81, SUMS32(0), SUMS32(32), SUMS8(64), SUMS8(72))
#undef PRODUCTS

#endif  // HAS_WARPGROUPS
