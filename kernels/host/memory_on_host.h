// Memory of the GPUs that the CPU plays. Each allocation ends with a page of its own, behind which nobody may go; only work of
// its GPU may touch it, and when it is freed nobody may.
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

enum { PAGE = 4096, ALIGNMENT = 256 };
inline size_t up_to(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
inline void protect(Address address, const Allocation& allocation) {
    const Address start = address / PAGE * PAGE, end = address + up_to(allocation.bytes, ALIGNMENT);
    mprotect((void*)start, end - start, open_to >> allocation.gpu & 1 ? PROT_READ | PROT_WRITE : PROT_NONE);
}
inline void open_memory(unsigned gpus) {
    if (gpus == open_to) return;
    open_to = gpus;
    for (const auto& [address, allocation] : allocations) protect(address, allocation);
}
// 0 where there is too little.
inline Address take(size_t bytes, int gpu) {
    if (bytes > MEMORY - taken[gpu]) return 0;
    const size_t used = up_to(bytes, ALIGNMENT), pages = up_to(used, PAGE);
    void* const memory = mmap(nullptr, pages + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0;
    mprotect(memory, pages, PROT_READ | PROT_WRITE);
    const Address address = (Address)memory + pages - used;
    memset((void*)address, 0xCD, used);
    taken[gpu] += bytes;
    allocations[address] = {bytes, gpu};
    protect(address, allocations[address]);
    return address;
}
inline void give_back(Address address) {
    const Allocation allocation = allocations[address];
    taken[allocation.gpu] -= allocation.bytes;
    const Address start = address / PAGE * PAGE;
    const size_t size = address - start + up_to(allocation.bytes, ALIGNMENT);
    // The addresses are nobody's from now on.
    madvise((void*)start, size, MADV_DONTNEED);
    mprotect((void*)start, size, PROT_NONE);
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
