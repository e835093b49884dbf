// Memory of the GPUs that the CPU plays. Each allocation has pages of its own, which only work of its GPU may touch; what is
// freed nobody may.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>

namespace driver {

typedef uint64_t Address;
enum { GPUS = 2 };
const size_t MEMORY = size_t(6) << 30;

struct Allocation {
    size_t bytes;
    int gpu;
};
inline std::map<Address, Allocation> allocations;
inline size_t taken[GPUS];
// A bit for each GPU whose memory can be touched now.
inline unsigned open_to = (1u << GPUS) - 1;

inline size_t whole_pages(size_t bytes) { return (bytes / 4096 + 1) * 4096; }
inline void protect(Address address, const Allocation& allocation) {
    mprotect((void*)address, whole_pages(allocation.bytes), open_to >> allocation.gpu & 1 ? PROT_READ | PROT_WRITE : PROT_NONE);
}
inline void open_memory(unsigned gpus) {
    if (gpus == open_to) return;
    open_to = gpus;
    for (const auto& [address, allocation] : allocations) protect(address, allocation);
}
// 0 where there is too little.
inline Address take(size_t bytes, int gpu) {
    if (bytes > MEMORY - taken[gpu]) return 0;
    void* const memory = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0;
    taken[gpu] += bytes;
    allocations[(Address)memset(memory, 0xCD, bytes)] = {bytes, gpu};
    protect((Address)memory, allocations[(Address)memory]);
    return (Address)memory;
}
inline void give_back(Address address) {
    const Allocation allocation = allocations[address];
    taken[allocation.gpu] -= allocation.bytes;
    munmap((void*)address, whole_pages(allocation.bytes));
    allocations.erase(address);
}
// Whose memory has these bytes; -1: nobody's.
inline int owner(Address address, size_t bytes) {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return -1;
    const auto& [start, allocation] = *--after;
    return address + bytes <= start + allocation.bytes ? allocation.gpu : -1;
}

}  // namespace driver
