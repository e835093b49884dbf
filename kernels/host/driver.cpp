// What the engine calls of the CUDA driver, on the CPU: a libcuda.so for tests of the engine where there is no GPU. It plays two
// GPUs, of compute capability 8.0, which are as late as GPUs may be (streams_on_host.h) and cannot touch each other's memory but
// by copies from one to the other (memory_on_host.h). Misuse is an error, also some that a GPU would let pass.
//   PARITY_DRIVER_EVENTS=late   a graph's events are past until its launch gets there, as the launch before left them
//   PARITY_DRIVER_GRAPHS=none   no graph can be made
//   PARITY_DRIVER_STREAMS=eager what goes first by priority is done at once, so that it meets what is late
// At the end the numbers of launches, of graphs and of copies between GPUs go to stderr.
#define CUDA_ON_HOST
#include "cuda_on_host.h"
// (The order matters: the shim defines what CUDA would.)
#include "../all.cu"

#include <mutex>

#include "memory_on_host.h"
#include "streams_on_host.h"

namespace driver {

enum Result {
    SUCCESS = 0,
    INVALID = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 101,
    NO_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
};
// A context, and what is loaded there.
struct Gpu {
    int number;
};
struct Function {
    const cushim::Kernel* kernel;
    int gpu;
};
struct Graph {
    std::vector<Step> steps;
    size_t lanes;
};

std::recursive_mutex access;
Gpu gpus[GPUS] = {{0}, {1}};
thread_local Gpu* current;
std::vector<Stream*> streams;
uint64_t launches, graphs, between_gpus;
bool is_set(const char* name, const char* value) { return getenv(name) && !strcmp(getenv(name), value); }
const bool late = is_set("PARITY_DRIVER_EVENTS", "late"), no_graphs = is_set("PARITY_DRIVER_GRAPHS", "none");
const bool eager = is_set("PARITY_DRIVER_STREAMS", "eager");
struct Told {
    // A program may look whether the library is there, and close it again.
    ~Told() {
        if (launches > 0) fprintf(stderr, "%lu launches, %lu graphs, %lu copies between GPUs\n", (unsigned long)launches, (unsigned long)graphs, (unsigned long)between_gpus);
    }
} told;

// What ends memory waits for everything.
void finish_all() {
    for (Stream* stream : streams) stream->end().reach();
}
// What must not be called while something is captured ends the capture.
bool is_capturing() {
    bool any = false;
    for (Stream* stream : streams)
        if (stream->capture) any = stream->capture->invalid = true;
    return any;
}
char* room(size_t bytes) { return (char*)aligned_alloc(256, (bytes / 256 + 1) * 256); }
// Enqueues work of the stream's GPU with the memory of `gpus`, by bits.
int put(Stream* stream, unsigned gpus, Work work) {
    stream->put([=] {
        open_memory(gpus);
        work();
    });
    return SUCCESS;
}
// Enqueues a copy, or what else touches these bytes, which must be the memory of the stream's GPU.
int put_copy(Stream* stream, std::initializer_list<Address> touched, size_t bytes, Work work) {
    for (Address address : touched)
        if (owner(address, bytes) != stream->gpu) return INVALID;
    return put(stream, 1u << stream->gpu, work);
}

}  // namespace driver

using namespace driver;
#define ONE_AT_A_TIME std::lock_guard<std::recursive_mutex> lock(access)

extern "C" {
int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int* count) { return *count = GPUS, SUCCESS; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < GPUS ? SUCCESS : NO_DEVICE; }
int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "a CPU"), SUCCESS; }
// Compute capability 8.0, and shared memory of a block.
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 8 : attribute == 97 ? 99 << 10 : 0, SUCCESS; }
int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 1, SUCCESS; }
int cuDevicePrimaryCtxRetain(Gpu** context, int device) { return *context = &gpus[device], SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxSetCurrent(Gpu* context) { return current = context, SUCCESS; }
int cuCtxGetCurrent(Gpu** context) { return *context = current, SUCCESS; }
int cuCtxEnablePeerAccess(Gpu* other, unsigned) { return current && other != current ? SUCCESS : INVALID; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, SUCCESS; }
int cuGetErrorString(int, const char** text) { return *text = "an error of the driver on the CPU", SUCCESS; }

// ---------------------------------------------------------------- memory

int cuMemAlloc_v2(Address* address, size_t bytes) {
    ONE_AT_A_TIME;
    if (!current) return NO_CONTEXT;
    if (is_capturing()) return CAPTURE_UNSUPPORTED;
    *address = take(bytes, current->number);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
int cuMemFree_v2(Address address) {
    ONE_AT_A_TIME;
    if (!allocations.count(address)) return INVALID;
    if (is_capturing()) return CAPTURE_UNSUPPORTED;
    finish_all();
    give_back(address);
    return SUCCESS;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
    ONE_AT_A_TIME;
    if (!current) return NO_CONTEXT;
    return *free = MEMORY - taken[current->number], *total = MEMORY, SUCCESS;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) { return *memory = room(bytes), SUCCESS; }
int cuMemFreeHost(void* memory) {
    ONE_AT_A_TIME;
    finish_all();
    free(memory);
    return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    const std::string copy((const char*)from, bytes);  // memory that is not pinned is taken over at once
    return put_copy(stream, {to}, bytes, [=] { memcpy((void*)to, copy.data(), bytes); });
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    return put_copy(stream, {from}, bytes, [=] { memcpy(to, (const void*)from, bytes); });
}
// It waits for no stream of the engine: theirs do not wait for the default one.
int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
    ONE_AT_A_TIME;
    if (!current || owner(from, bytes) != current->number) return INVALID;
    if (is_capturing()) return CAPTURE_UNSUPPORTED;
    open_memory(1u << current->number);
    memcpy(to, (const void*)from, bytes);
    return SUCCESS;
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    return put_copy(stream, {to, from}, bytes, [=] { memmove((void*)to, (const void*)from, bytes); });
}
int cuMemcpyPeerAsync(Address to, Gpu* target, Address from, Gpu* source, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    if (owner(to, bytes) != target->number || owner(from, bytes) != source->number) return INVALID;
    between_gpus++;
    return put(stream, 1u << target->number | 1u << source->number, [=] { memcpy((void*)to, (const void*)from, bytes); });
}
int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    return put_copy(stream, {to}, bytes, [=] { memset((void*)to, value, bytes); });
}

// ---------------------------------------------------------------- streams and events

int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
    ONE_AT_A_TIME;
    if (!current) return NO_CONTEXT;
    if (flags != 1) return INVALID;  // one that does not wait for the default stream
    streams.push_back(*stream = new Stream{current->number, eager && priority < 0});
    return SUCCESS;
}
int cuStreamCreate(Stream** stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
int cuStreamDestroy_v2(Stream*) { return SUCCESS; }
int cuStreamSynchronize(Stream* stream) {
    ONE_AT_A_TIME;
    if (stream->capture) return CAPTURE_UNSUPPORTED;
    stream->end().reach();
    return SUCCESS;
}
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    ONE_AT_A_TIME;
    if (!event->capture) {
        if (stream->capture) return CAPTURE_ISOLATION;
        stream->put([point = event->point] { point.reach(); });
        return SUCCESS;
    }
    if (event->capture->over || (stream->capture && stream->capture != event->capture)) return CAPTURE_MERGE;
    event->hold_captured(stream);
    return SUCCESS;
}
int cuEventCreate(Event** event, unsigned) {
    if (!current) return NO_CONTEXT;
    return *event = new Event{current->number}, SUCCESS;
}
int cuEventDestroy_v2(Event*) { return SUCCESS; }
// `flags` 1: each launch of the graph marks the event.
int cuEventRecordWithFlags(Event* event, Stream* stream, unsigned flags) {
    ONE_AT_A_TIME;
    if (event->gpu != stream->gpu) return INVALID_HANDLE;
    if (flags == 0) return event->mark(stream), SUCCESS;
    return stream->capture ? event->mark_by_graph(stream), SUCCESS : INVALID;
}
int cuEventRecord(Event* event, Stream* stream) { return cuEventRecordWithFlags(event, stream, 0); }
int cuEventSynchronize(Event* event) {
    ONE_AT_A_TIME;
    if (event->capture) return CAPTURED_EVENT;
    event->point.reach();
    return SUCCESS;
}
// Something is done whenever somebody asks, so that asking again and again ends.
int cuEventQuery(Event* event) {
    ONE_AT_A_TIME;
    if (event->capture) return CAPTURED_EVENT;
    const auto [stream, n] = event->point;
    if (stream) Point{stream, std::min(stream->done + 3, n)}.reach();
    return event->point.is_past() ? SUCCESS : NOT_READY;
}

// ---------------------------------------------------------------- graphs

int cuStreamIsCapturing(Stream* stream, int* status) { return *status = stream->capture != nullptr, SUCCESS; }
int cuStreamBeginCapture_v2(Stream* stream, int) {
    ONE_AT_A_TIME;
    if (stream->capture) return INVALID;
    stream->join(new Capture());
    return SUCCESS;
}
int cuStreamEndCapture(Stream* stream, Graph** graph) {
    ONE_AT_A_TIME;
    const Capture* const capture = stream->capture;
    if (!capture || stream->lane != 0) return INVALID;
    const bool joined = end_capture(stream);
    *graph = joined && !capture->invalid ? new Graph{capture->steps, capture->streams.size()} : nullptr;
    return capture->invalid ? CAPTURE_INVALIDATED : joined ? SUCCESS : CAPTURE_UNJOINED;
}
int cuGraphInstantiateWithFlags(Graph** launched, Graph* graph, uint64_t) {
    if (no_graphs) return OUT_OF_MEMORY;
    return *launched = new Graph(*graph), SUCCESS;
}
int cuGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
int cuGraphExecDestroy(Graph* graph) { return delete graph, SUCCESS; }
int cuGraphLaunch(Graph* graph, Stream* stream) {
    ONE_AT_A_TIME;
    graphs++;
    launch_graph(graph->steps, graph->lanes, stream, late);
    return SUCCESS;
}

// ---------------------------------------------------------------- kernels

int cuModuleLoadData(Gpu** module, const void*) { return *module = current, current ? SUCCESS : NO_CONTEXT; }
int cuModuleUnload(Gpu*) { return SUCCESS; }
int cuModuleGetFunction(const Function** function, Gpu* module, const char* name) {
    for (const cushim::Kernel& kernel : cushim::kernels())
        if (!strcmp(kernel.name, name)) return *function = new Function{&kernel, module->number}, SUCCESS;
    return NOT_FOUND;
}
int cuFuncSetAttribute(const Function*, int, int) { return SUCCESS; }
int cuLaunchKernel(const Function* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned,
                   Stream* stream, void** params, void**) {
    ONE_AT_A_TIME;
    if (function->gpu != stream->gpu) return INVALID_HANDLE;
    launches++;
    const cushim::Kernel* const kernel = function->kernel;
    const std::shared_ptr<char> args(room(kernel->args_size), free);
    memcpy(args.get(), params[0], kernel->args_size);
    return put(stream, 1u << stream->gpu, [=] {
        const unsigned grid[3] = {x, y, z};
        char message[256] = "";
        if (!cuda_on_host_launch(kernel->name, args.get(), kernel->args_size, grid, threads, 0, message, sizeof message)) return;
        fprintf(stderr, "%s: %s\n", kernel->name, message);
        abort();
    });
}
}
