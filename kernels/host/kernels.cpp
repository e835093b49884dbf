// The kernels as a shared library for the host: see cuda_on_host.h.
#define CUDA_ON_HOST
#include "cuda_on_host.h"
// (The order matters: the shim defines what CUDA would.)
#include "../all.cu"

extern "C" int parity_kernels_launch(const char* name, const void* args, size_t args_size, const unsigned grid[3],
                                     unsigned threads, unsigned seed, char* message, size_t message_size) {
    return cuda_on_host_launch(name, args, args_size, grid, threads, seed, message, message_size);
}
