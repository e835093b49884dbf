// Runs kernels on the CPU: one ucontext fiber per CUDA thread, blocks one after another.
//
// For tests without a GPU. Between two barriers the threads of a block run one at a time in a seeded random
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

enum State { RUNNING, AT_BARRIER, IN_WARP_OP, DONE };

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
    Index3 thread;
    int index;
    State state;
    unsigned mask;
    uint32_t value;
    int source;
    WarpOp op;
    std::vector<char> stack;
    // Asynchronous copies by group: they are done when they are waited for, no earlier.
    std::vector<std::vector<AsyncCopy>> groups;
};

// What mma and ldmatrix of one warp exchange.
struct WarpMatrices {
    uint32_t a[32][4], b[32][2];
    const void* rows[32];
};

// The block that is being executed. Every thread of the host has its own, so that kernels run side by side.
struct Machine {
    std::vector<Fiber> fibers;
    Fiber* current;
    jmp_buf scheduler;
    Index3 block, block_dim, grid_dim;
    std::function<void()> body;
    alignas(16) char shared_bytes[99 << 10];
    WarpMatrices warps[32];
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
inline void entry() {
    machine->body();
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
// The last group is open, and waits for nothing.
inline void async_wait(size_t but_last) {
    auto& groups = machine->current->groups;
    while (groups.size() > but_last + 1) {
        for (const AsyncCopy& copy : groups.front()) memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
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

// Runs the fibers of one block to their ends.
inline bool run_block(std::mt19937& random, bool shuffle) {
    // Coprime to every multiple of 32 up to 1024: a walk by such a step meets each thread once.
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
            if (machine->fibers[i].state != RUNNING) continue;
            if (held[i / 32]) {
                moved = true;
                continue;
            }
            resume(machine->fibers[i]);
            moved = true;
        }
        for (size_t from = 0; from < machine->fibers.size(); from += 32) moved |= release_warp(from);
        size_t done = 0, waiting = 0;
        for (const Fiber& f : machine->fibers) {
            done += f.state == DONE;
            waiting += f.state == AT_BARRIER;
        }
        if (done == machine->fibers.size()) return true;
        if (waiting == machine->fibers.size()) {
            for (Fiber& f : machine->fibers) f.state = RUNNING;
        } else if (!moved) {
            machine->failure = waiting + done == machine->fibers.size()
                          ? "a barrier was reached by " + std::to_string(waiting) + " of " +
                                std::to_string(machine->fibers.size()) + " threads"
                          : "a warp operation was not reached by all its lanes";
            return false;
        }
    }
}

// `seed` 0 runs the threads in order.
inline bool launch(Index3 grid, Index3 threads, unsigned seed, std::function<void()> kernel) {
    static thread_local std::unique_ptr<Machine> own;
    if (!own) own = std::make_unique<Machine>();
    machine = own.get();
    machine->grid_dim = grid;
    machine->block_dim = threads;
    machine->body = std::move(kernel);
    machine->failure.clear();
    machine->votes = 0;
    machine->fibers.resize(threads.x * threads.y * threads.z);
    std::mt19937 random(seed);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                machine->block = {x, y, z};
                memset(machine->shared_bytes, 0xCD, sizeof machine->shared_bytes);
                for (size_t i = 0; i < machine->fibers.size(); i++) {
                    Fiber& f = machine->fibers[i];
                    f.stack.resize(64 << 10);
                    f.index = i;
                    f.thread = {unsigned(i) % threads.x, unsigned(i) / threads.x % threads.y,
                                unsigned(i) / (threads.x * threads.y)};
                    f.state = RUNNING;
                    f.started = false;
                    f.groups.assign(1, {});
                    getcontext(&f.context);
                    f.context.uc_stack.ss_sp = f.stack.data();
                    f.context.uc_stack.ss_size = f.stack.size();
                    f.context.uc_link = nullptr;
                    makecontext(&f.context, entry, 0);
                }
                if (!run_block(random, seed != 0)) return false;
            }
    return true;
}

template <class T>
T& shared() {
    static_assert(sizeof(T) <= 48 << 10, "static shared memory is at most 48 KB");
    return *reinterpret_cast<T*>(machine->shared_bytes);
}

// In dynamic shared memory.
template <class T>
T& dynamic() {
    static_assert(sizeof(T) <= sizeof machine->shared_bytes, "dynamic shared memory is at most 99 KB on most GPUs");
    return *reinterpret_cast<T*>(machine->shared_bytes);
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

// mma.m16n8k16 with f16 operands and f32 accumulation, in f64 rounded once.
inline void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    const int lane = machine->current->index % 32, g = lane / 4, q = lane % 4;
    WarpMatrices& w = machine->warps[machine->current->index / 32];
    memcpy(w.a[lane], a, 16);
    memcpy(w.b[lane], b, 8);
    warp_op(SYNC, 0xffffffffu, 0, 0);
    const auto half_of = [](uint32_t two, int which) { return half_to_float(two >> (16 * which)); };
    for (int part = 0; part < 4; part++) {
        const int row = g + part / 2 * 8, col = 2 * q + part % 2;
        double sum = d[part];
        for (int k = 0; k < 16; k++) {
            const uint32_t x = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const uint32_t y = w.b[col * 4 + k % 8 / 2][k / 8];
            sum += double(half_of(x, k % 2)) * half_of(y, k % 2);
        }
        d[part] = sum;
    }
    warp_op(SYNC, 0xffffffffu, 0, 0);
}

// mma.m16n8k8 with operands in TF32 and f32 accumulation, likewise.
inline void mma_1688(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    const int lane = machine->current->index % 32, g = lane / 4, q = lane % 4;
    WarpMatrices& w = machine->warps[machine->current->index / 32];
    memcpy(w.a[lane], a, 16);
    memcpy(w.b[lane], b, 8);
    warp_op(SYNC, 0xffffffffu, 0, 0);
    const auto value = [](uint32_t bits) {
        float x;
        bits &= 0xffffe000u;
        memcpy(&x, &bits, 4);
        return double(x);
    };
    for (int part = 0; part < 4; part++) {
        const int row = g + part / 2 * 8, col = 2 * q + part % 2;
        double sum = d[part];
        for (int k = 0; k < 8; k++)
            sum += value(w.a[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * value(w.b[col * 4 + k % 4][k / 4]);
        d[part] = sum;
    }
    warp_op(SYNC, 0xffffffffu, 0, 0);
}

// ldmatrix.m8n8.x4
inline void load_matrices(uint32_t out[4], const void* row) {
    const int lane = machine->current->index % 32;
    const void** rows = machine->warps[machine->current->index / 32].rows;
    rows[lane] = row;
    warp_op(SYNC, 0xffffffffu, 0, 0);
    for (int n = 0; n < 4; n++) memcpy(&out[n], (const char*)rows[8 * n + lane / 4] + lane % 4 * 4, 4);
    warp_op(SYNC, 0xffffffffu, 0, 0);
}

// ldmatrix.m8n8.x4.trans
inline void load_matrices_transposed(uint32_t out[4], const void* row) {
    const int lane = machine->current->index % 32;
    const void** rows = machine->warps[machine->current->index / 32].rows;
    rows[lane] = row;
    warp_op(SYNC, 0xffffffffu, 0, 0);
    for (int n = 0; n < 4; n++)
        for (int e = 0; e < 2; e++) {
            const char* from = (const char*)rows[8 * n + lane % 4 * 2 + e];
            memcpy((char*)&out[n] + 2 * e, from + lane / 4 * 2, 2);
        }
    warp_op(SYNC, 0xffffffffu, 0, 0);
}

// A kernel by its name.
struct Kernel {
    const char* name;
    size_t args_size;
    void (*run)(const void* args);
};
inline std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all;
    return all;
}
struct Register {
    Register(const char* name, size_t args_size, void (*run)(const void*)) {
        kernels().push_back({name, args_size, run});
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
#define blockIdx (cushim::machine->block)
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
        if (cushim::launch({grid[0], grid[1], grid[2]}, {threads, 1, 1}, seed, [&] { kernel.run(args); })) return 0;
        snprintf(message, message_size, "%s", cushim::machine->failure.c_str());
        return 3;
    }
    return 1;
}
