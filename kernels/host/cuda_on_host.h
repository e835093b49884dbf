// Runs kernels on the CPU: one ucontext fiber per CUDA thread, blocks one after another, or clusters of them.
//
// For tests without a GPU. Between two barriers the threads run one at a time in a seeded random
// order and the warps at different paces, shared memory starts as garbage in every block, and barriers or warp operations that not all threads
// reach are errors: so a missing barrier gives wrong values and a divergent one is reported.
// Compile as C++17 with -DCUDA_ON_HOST -fno-strict-aliasing -ffp-contract=off. x86-64 and AArch64 GNU/Linux.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

using std::max;
using std::min;

struct Index3 {
    unsigned x, y, z;
};

namespace cushim {

enum State { RUNNING, AT_BARRIER, AT_CLUSTER_BARRIER, AT_SHARED_BARRIER, IN_WARP_OP, DONE };

// What the lanes of a warp do together.
enum WarpOp { EXCHANGE, BALLOT, SYNC };

struct AsyncCopy {
    void* to;
    const void* from;
};

struct Fiber {
    ucontext_t context;  // where it starts
    jmp_buf stopped;     // where it goes on: unlike swapcontext, a jump makes no system call
    bool started;
    Index3 thread, block;
    int index, rank;  // among all fibers; of its block in the cluster
    State state;
    unsigned mask;
    uint32_t value;
    int source;
    WarpOp op;
    std::vector<char> stack;
    // Asynchronous copies by group: they are done when they are waited for, no earlier.
    std::vector<std::vector<AsyncCopy>> groups;
    // Products of a warpgroup, likewise.
    std::vector<std::vector<std::function<void()>>> products;
    std::function<bool()> is_over;  // what it waits for AT_SHARED_BARRIER
};

// What mma and ldmatrix of one warp exchange.
struct WarpMatrices {
    uint32_t a[32][4], b[32][2];
    const void* rows[32];
};

// Shared memory of a block: all that Hopper has.
struct alignas(1024) SharedMemory {
    char bytes[227 << 10];
};

// The block that is being executed, or the blocks of one cluster. Every thread of the host has its own, so that kernels run
// side by side.
struct Machine {
    std::vector<Fiber> fibers;
    Fiber* current;
    jmp_buf scheduler;
    Index3 block_dim, grid_dim;
    std::function<void()> body;
    std::vector<SharedMemory> memory;  // by rank
    WarpMatrices warps[128];
    int votes;  // of __syncthreads_or
    std::string failure;
};
inline thread_local Machine* machine __attribute__((tls_model("initial-exec")));

inline void yield(State state) {
    machine->current->state = state;
    if (!_setjmp(machine->current->stopped)) _longjmp(machine->scheduler, 1);
}
inline void resume(Fiber& fiber) {
    machine->current = &fiber;
    if (_setjmp(machine->scheduler)) return;
    if (fiber.started) _longjmp(fiber.stopped, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}
// Memory of a block whose threads are all done is another's.
inline void leave_block() {
    const int rank = machine->current->rank;
    for (const Fiber& f : machine->fibers)
        if (f.rank == rank && &f != machine->current && f.state != DONE) return;
    memset(machine->memory[rank].bytes, 0xCD, sizeof(SharedMemory));
}
inline void entry() {
    machine->body();
    if (machine->memory.size() > 1) leave_block();
    yield(DONE);
}
inline uint32_t warp_op(WarpOp op, unsigned mask, uint32_t value, int source) {
    machine->current->mask = mask;
    machine->current->value = value;
    machine->current->source = source;
    machine->current->op = op;
    yield(IN_WARP_OP);
    return machine->current->value;
}

inline void async_copy(void* to, const void* from) { machine->current->groups.back().push_back({to, from}); }
inline void async_group() { machine->current->groups.emplace_back(); }
// Does what is in all groups but the last ones; behind these is one more, which is open and waits for nothing.
template <class Groups, class Do>
void finish_groups(Groups& groups, size_t but_last, Do finish) {
    while (groups.size() > but_last + 1) {
        for (const auto& one : groups.front()) finish(one);
        groups.erase(groups.begin());
    }
}
inline void async_wait(size_t but_last) {
    finish_groups(machine->current->groups, but_last, [](const AsyncCopy& copy) { memcpy(copy.to, copy.from, 16); });
}

// Lets the warp that starts at `from` go on, if all its lanes stand in the same warp operation.
inline bool release_warp(int from) {
    const int lanes = std::min<int>(32, machine->fibers.size() - from);
    const unsigned live = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    unsigned waiting = 0, mask = 0, votes = 0;
    for (int i = 0; i < lanes; i++) {
        const Fiber& f = machine->fibers[from + i];
        if (f.state != IN_WARP_OP) continue;
        waiting |= 1u << i;
        mask = f.mask & live;
        if (f.value) votes |= 1u << i;
    }
    if (!waiting || (waiting & mask) != mask) return false;
    uint32_t values[32];
    for (int i = 0; i < lanes; i++) values[i] = machine->fibers[from + i].value;
    for (int i = 0; i < lanes; i++) {
        if (!(mask >> i & 1)) continue;
        Fiber& f = machine->fibers[from + i];
        if (f.op == BALLOT) f.value = votes & mask;
        if (f.op == EXCHANGE) f.value = values[f.source < lanes && (mask >> f.source & 1) ? f.source : i];
        f.state = RUNNING;
    }
    return true;
}

// Lets the blocks go on whose threads all stand at their barrier, and the cluster.
inline bool release_barriers(size_t threads) {
    bool released = false;
    const auto release = [&](size_t from, size_t to, State state) {
        for (size_t i = from; i < to; i++)
            if (machine->fibers[i].state != state) return;
        for (size_t i = from; i < to; i++) machine->fibers[i].state = RUNNING;
        released = true;
    };
    const size_t all = machine->fibers.size();
    for (size_t from = 0; from < all; from += threads) release(from, from + threads, AT_BARRIER);
    release(0, all, AT_CLUSTER_BARRIER);
    return released;
}

// Runs the fibers of one block, or cluster, to their ends.
inline bool run_blocks(std::mt19937& random, bool shuffle, size_t of_block) {
    // Coprime to every multiple of 32 that blocks and clusters have: a walk by such a step meets each thread once.
    static const int STEPS[8] = {37, 41, 43, 47, 53, 59, 61, 67};
    const int threads = machine->fibers.size(), warps = (threads + 31) / 32;
    // Warps have different paces: a lazy one moves in one of 24 rounds.
    std::vector<bool> lazy(warps), held(warps);
    for (int w = 0; w < warps; w++) lazy[w] = shuffle && random() % 4 == 0;
    for (;;) {
        for (int w = 0; w < warps; w++) held[w] = lazy[w] && random() % 24 != 0;
        const int start = shuffle ? random() % threads : 0, step = shuffle ? STEPS[random() % 8] : 1;
        bool moved = false;
        for (int n = 0, i = start; n < threads; n++, i = (i + step) % threads) {
            Fiber& fiber = machine->fibers[i];
            if (fiber.state == AT_SHARED_BARRIER && fiber.is_over()) fiber.state = RUNNING;
            if (fiber.state != RUNNING) continue;
            if (held[i / 32]) {
                moved = true;
                continue;
            }
            resume(fiber);
            moved = true;
        }
        for (size_t from = 0; from < machine->fibers.size(); from += 32) moved |= release_warp(from);
        size_t done = 0, waiting = 0;
        for (const Fiber& f : machine->fibers) {
            done += f.state == DONE;
            waiting += f.state == AT_BARRIER;
        }
        if (done == machine->fibers.size()) return true;
        moved |= release_barriers(of_block);
        if (!moved) {
            machine->failure = waiting + done == machine->fibers.size()
                          ? "a barrier was reached by " + std::to_string(waiting) + " of " +
                                std::to_string(machine->fibers.size()) + " threads"
                          : "a warp operation, or a barrier in shared memory, was not reached by all that it waits for";
            return false;
        }
    }
}

// `seed` 0 runs the threads in order.
inline bool launch(Index3 grid, Index3 threads, Index3 cluster, unsigned seed, std::function<void()> kernel) {
    static thread_local std::unique_ptr<Machine> own;
    if (!own) own = std::make_unique<Machine>();
    machine = own.get();
    machine->grid_dim = grid;
    machine->block_dim = threads;
    machine->body = std::move(kernel);
    machine->failure.clear();
    machine->votes = 0;
    const size_t of_block = threads.x * threads.y * threads.z, blocks = cluster.x * cluster.y;
    machine->fibers.resize(of_block * blocks);
    machine->memory.resize(blocks);
    if (grid.x % cluster.x || grid.y % cluster.y) {
        machine->failure = "a grid that is no whole clusters";
        return false;
    }
    std::mt19937 random(seed);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y += cluster.y)
            for (unsigned x = 0; x < grid.x; x += cluster.x) {
                memset(machine->memory.data(), 0xCD, blocks * sizeof(SharedMemory));
                for (size_t i = 0; i < machine->fibers.size(); i++) {
                    Fiber& f = machine->fibers[i];
                    const unsigned thread = i % of_block, rank = i / of_block;
                    f.stack.resize(64 << 10);
                    f.index = i;
                    f.rank = rank;
                    f.block = {x + rank % cluster.x, y + rank / cluster.x, z};
                    f.thread = {thread % threads.x, thread / threads.x % threads.y, thread / (threads.x * threads.y)};
                    f.state = RUNNING;
                    f.started = false;
                    f.groups.assign(1, {});
                    f.products.assign(1, {});
                    getcontext(&f.context);
                    f.context.uc_stack.ss_sp = f.stack.data();
                    f.context.uc_stack.ss_size = f.stack.size();
                    f.context.uc_link = nullptr;
                    makecontext(&f.context, entry, 0);
                }
                if (!run_blocks(random, seed != 0, of_block)) return false;
            }
    return true;
}

inline char* own_memory() { return machine->memory[machine->current->rank].bytes; }

template <class T>
T& shared() {
    static_assert(sizeof(T) <= 48 << 10, "static shared memory is at most 48 KB");
    return *reinterpret_cast<T*>(own_memory());
}

// In dynamic shared memory.
template <class T>
T& dynamic() {
    static_assert(sizeof(T) <= 99 << 10, "dynamic shared memory is at most 99 KB on most GPUs");
    return *reinterpret_cast<T*>(own_memory());
}

inline float half_to_float(uint16_t bits) {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return h;
}
inline uint16_t float_to_half(float x) {
    const _Float16 h = static_cast<_Float16>(x);
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
}

// A kernel by its name.
struct Kernel {
    const char* name;
    size_t args_size;
    void (*run)(const void* args);
    Index3 cluster;
};
inline std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all;
    return all;
}
struct Register {
    Register(const char* name, size_t args_size, void (*run)(const void*), Index3 cluster = {1, 1, 1}) {
        kernels().push_back({name, args_size, run, cluster});
    }
};

template <class T>
uint32_t to_bits(T value) {
    static_assert(sizeof(T) == 4, "warp operations move 32 bits");
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
template <class T>
T from_bits(uint32_t bits) {
    T value;
    memcpy(&value, &bits, 4);
    return value;
}

}  // namespace cushim

#include "tensor_cores_on_host.h"

#define __device__
#define __forceinline__ inline
#define SHARED(type, name) type& name = cushim::shared<type>()
#define KERNEL(name, args_type, ...)                                                      \
    static cushim::Register register_##name(#name, sizeof(args_type), [](const void* p) { \
        const args_type args = *(const args_type*)p;                                      \
        __VA_ARGS__(args);                                                                \
    });
#define DYNAMIC(type, name) type& name = cushim::dynamic<type>()
#define KERNEL_SIZED(name, args_type, threads, blocks, ...) KERNEL(name, args_type, __VA_ARGS__)
#define KERNEL_AHEAD(name, args_type, threads, blocks, ...) KERNEL(name, args_type, __VA_ARGS__)
#define threadIdx (cushim::machine->current->thread)
#define blockIdx (cushim::machine->current->block)
#define blockDim (cushim::machine->block_dim)
#define gridDim (cushim::machine->grid_dim)

inline void __syncthreads() { cushim::yield(cushim::AT_BARRIER); }
// A barrier at which threads vote.
inline int __syncthreads_or(int vote) {
    if (vote) cushim::machine->votes = 1;
    cushim::yield(cushim::AT_BARRIER);
    const int found = cushim::machine->votes;
    cushim::yield(cushim::AT_BARRIER);
    cushim::machine->votes = 0;
    cushim::yield(cushim::AT_BARRIER);
    return found;
}
inline void __threadfence() {}
inline unsigned atomicAdd(uint32_t* p, uint32_t x) {
    const uint32_t before = *p;
    *p += x;
    return before;
}
inline unsigned __ballot_sync(unsigned mask, int vote) { return cushim::warp_op(cushim::BALLOT, mask, vote != 0, 0); }
inline void __syncwarp() { cushim::warp_op(cushim::BALLOT, ~0u, 0, 0); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return cushim::from_bits<T>(cushim::warp_op(cushim::EXCHANGE, mask, cushim::to_bits(value), lane & 31));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip) {
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
    for (uint32_t& word : words) word = __shfl_sync(mask, word, (cushim::machine->current->index & 31) ^ flip);
    memcpy(&value, words, sizeof(T));
    return value;
}
inline int __float_as_int(float x) { return (int)cushim::to_bits(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __int_as_float(int bits) { return cushim::from_bits<float>(bits); }

// Runs the kernel `name`. 0, or 1: no such kernel, 2: the struct has another size, 3: see `message`.
extern "C" inline int cuda_on_host_launch(const char* name, const void* args, size_t args_size, const unsigned grid[3],
                                          unsigned threads, unsigned seed, char* message, size_t message_size) {
    for (const cushim::Kernel& kernel : cushim::kernels()) {
        if (strcmp(kernel.name, name) != 0) continue;
        if (kernel.args_size != args_size) return 2;
        if (cushim::launch({grid[0], grid[1], grid[2]}, {threads, 1, 1}, kernel.cluster, seed, [&] { kernel.run(args); })) return 0;
        snprintf(message, message_size, "%s", cushim::machine->failure.c_str());
        return 3;
    }
    return 1;
}
