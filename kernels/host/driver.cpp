// What the engine calls of the CUDA driver, on the CPU: a libcuda.so.1 for tests of the engine where there is no GPU.
//
// What is enqueued on any stream waits in one queue until somebody waits for it: as late as a GPU may be, and in an order
// that a GPU may choose. A stream that is captured must come back to the one that began, or the capture fails.
//   PARITY_DRIVER_EVENTS=late   a graph's events are past until its launch gets there, as the launch before left them
//   PARITY_DRIVER_GRAPHS=none   no graph can be made
// At the end the number of launches and of graphs that were launched goes to stderr.
#define CUDA_ON_HOST
#include "cuda_on_host.h"
// (The order matters: the shim defines what CUDA would.)
#include "../all.cu"

#include <deque>
#include <map>
#include <mutex>

namespace driver {

enum Result {
    SUCCESS = 0,
    INVALID = 1,
    OUT_OF_MEMORY = 2,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
};
typedef uint64_t Address;
typedef std::function<void()> Work;

struct Event;
struct Stream;
// How much of the work of each stream is known to be done before.
typedef std::map<Stream*, uint64_t> Known;
struct Step {
    Work work;
    Event* marks;  // or null
};
struct Capture {
    Known enqueued;
    std::vector<Step> steps;
};
struct Graph {
    std::vector<Step> steps;
};
struct Stream {
    Capture* capture;
    Known known;
};
struct Event {
    uint64_t past;  // when so much of the queue is done
    Capture* capture;
    Known known;
};

const size_t MEMORY = size_t(6) << 30;
std::recursive_mutex access;
std::deque<Work> queue;
uint64_t enqueued, done, launches, graphs;
size_t taken;
std::map<Address, size_t> sizes;
bool is_set(const char* name, const char* value) { return getenv(name) && !strcmp(getenv(name), value); }
const bool late = is_set("PARITY_DRIVER_EVENTS", "late"), no_graphs = is_set("PARITY_DRIVER_GRAPHS", "none");
struct Told {
    // A program may look whether the library is there, and close it again.
    ~Told() {
        if (launches > 0) fprintf(stderr, "%lu launches, %lu graphs\n", (unsigned long)launches, (unsigned long)graphs);
    }
} told;

void work_until(uint64_t end) {
    while (done < end) {
        const Work work = std::move(queue.front());
        queue.pop_front();
        work();
        done++;
    }
}
void put(Stream* stream, Work work, Event* marks = nullptr) {
    if (stream->capture) {
        stream->capture->steps.push_back({work, marks});
        stream->known[stream] = ++stream->capture->enqueued[stream];
    } else {
        queue.push_back(work);
        enqueued++;
    }
}
char* room(size_t bytes) { return (char*)aligned_alloc(256, (bytes / 256 + 1) * 256); }

}  // namespace driver

using namespace driver;
#define ONE_AT_A_TIME std::lock_guard<std::recursive_mutex> lock(access)

extern "C" {
int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, SUCCESS; }
int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "a CPU"), SUCCESS; }
// Compute capability 8.0, and shared memory of a block.
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 8 : attribute == 97 ? 99 << 10 : 0, SUCCESS; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &access, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxSetCurrent(void*) { return SUCCESS; }
int cuCtxGetCurrent(void** context) { return *context = &access, SUCCESS; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, SUCCESS; }
int cuGetErrorString(int, const char** text) { return *text = "an error of the driver on the CPU", SUCCESS; }

// ---------------------------------------------------------------- memory

int cuMemAlloc_v2(Address* address, size_t bytes) {
    ONE_AT_A_TIME;
    if (bytes > MEMORY - taken) return OUT_OF_MEMORY;
    *address = (Address)memset(room(bytes), 0xCD, bytes);
    sizes[*address] = bytes;
    taken += bytes;
    return SUCCESS;
}
int cuMemFree_v2(Address address) {
    ONE_AT_A_TIME;
    work_until(enqueued);
    memset((void*)address, 0xDD, sizes[address]);
    taken -= sizes[address];
    free((void*)address);
    return SUCCESS;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = MEMORY - taken, *total = MEMORY, SUCCESS; }
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) { return *memory = room(bytes), SUCCESS; }
int cuMemFreeHost(void* memory) {
    ONE_AT_A_TIME;
    work_until(enqueued);
    free(memory);
    return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    const std::string copy((const char*)from, bytes);  // memory that is not pinned is taken over at once
    put(stream, [=] { memcpy((void*)to, copy.data(), bytes); });
    return SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    put(stream, [=] { memcpy(to, (const void*)from, bytes); });
    return SUCCESS;
}
int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
    ONE_AT_A_TIME;
    work_until(enqueued);
    memcpy(to, (const void*)from, bytes);
    return SUCCESS;
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    put(stream, [=] { memmove((void*)to, (const void*)from, bytes); });
    return SUCCESS;
}
int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    put(stream, [=] { memset((void*)to, value, bytes); });
    return SUCCESS;
}

// ---------------------------------------------------------------- streams and events

int cuStreamCreate(Stream** stream, unsigned) { return *stream = new Stream(), SUCCESS; }
int cuStreamCreateWithPriority(Stream** stream, unsigned, int) { return *stream = new Stream(), SUCCESS; }
int cuStreamDestroy_v2(Stream* stream) {
    ONE_AT_A_TIME;
    delete stream;
    return SUCCESS;
}
int cuStreamSynchronize(Stream* stream) {
    ONE_AT_A_TIME;
    if (stream->capture) return CAPTURE_UNSUPPORTED;
    work_until(enqueued);
    return SUCCESS;
}
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    ONE_AT_A_TIME;
    if (!event->capture) return stream->capture ? CAPTURE_ISOLATION : SUCCESS;
    if (!stream->capture) *stream = {event->capture, {}};
    for (const auto& [other, work] : event->known) stream->known[other] = std::max(stream->known[other], work);
    return SUCCESS;
}
int cuEventCreate(Event** event, unsigned) { return *event = new Event(), SUCCESS; }
int cuEventDestroy_v2(Event* event) {
    ONE_AT_A_TIME;
    work_until(enqueued);
    delete event;
    return SUCCESS;
}
// `flags` 1: each launch of the graph marks the event.
int cuEventRecordWithFlags(Event* event, Stream* stream, unsigned flags) {
    ONE_AT_A_TIME;
    if (!stream->capture && flags == 1) return INVALID;
    if (stream->capture && flags == 0) {
        stream->capture->enqueued[stream];
        event->capture = stream->capture;
        event->known = stream->known;
        return SUCCESS;
    }
    put(stream, [] {}, event);
    event->capture = nullptr;
    if (!stream->capture) event->past = enqueued;
    return SUCCESS;
}
int cuEventRecord(Event* event, Stream* stream) { return cuEventRecordWithFlags(event, stream, 0); }
int cuEventSynchronize(Event* event) {
    ONE_AT_A_TIME;
    if (event->capture) return CAPTURED_EVENT;
    work_until(event->past);
    return SUCCESS;
}
// Something is done whenever somebody asks, so that asking again and again ends.
int cuEventQuery(Event* event) {
    ONE_AT_A_TIME;
    if (event->capture) return CAPTURED_EVENT;
    work_until(std::min(done + 3, enqueued));
    return done >= event->past ? SUCCESS : NOT_READY;
}

// ---------------------------------------------------------------- graphs

int cuStreamIsCapturing(Stream* stream, int* status) { return *status = stream->capture != nullptr, SUCCESS; }
int cuStreamBeginCapture_v2(Stream* stream, int) {
    ONE_AT_A_TIME;
    *stream = {new Capture(), {}};
    return SUCCESS;
}
int cuStreamEndCapture(Stream* stream, Graph** graph) {
    ONE_AT_A_TIME;
    Capture* const capture = stream->capture;
    bool joined = true;
    for (const auto& [other, work] : capture->enqueued) {
        joined &= stream->known[other] == work;
        other->capture = nullptr;
    }
    stream->capture = nullptr;
    *graph = joined ? new Graph{capture->steps} : nullptr;
    return joined ? SUCCESS : CAPTURE_UNJOINED;
}
int cuGraphInstantiateWithFlags(Graph** launched, Graph* graph, uint64_t) {
    if (no_graphs) return OUT_OF_MEMORY;
    return *launched = new Graph(*graph), SUCCESS;
}
int cuGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
int cuGraphExecDestroy(Graph* graph) {
    ONE_AT_A_TIME;
    work_until(enqueued);
    delete graph;
    return SUCCESS;
}
int cuGraphLaunch(Graph* graph, Stream* stream) {
    ONE_AT_A_TIME;
    graphs++;
    for (const Step& step : graph->steps) {
        const uint64_t at = enqueued + 1;
        if (step.marks && !late) step.marks->past = at;
        put(stream, [=] {
            step.work();
            if (step.marks) step.marks->past = at;
        });
    }
    return SUCCESS;
}

// ---------------------------------------------------------------- kernels

int cuModuleLoadData(void** module, const void*) { return *module = &access, SUCCESS; }
int cuModuleUnload(void*) { return SUCCESS; }
int cuModuleGetFunction(const cushim::Kernel** function, void*, const char* name) {
    for (const cushim::Kernel& kernel : cushim::kernels())
        if (!strcmp(kernel.name, name)) return *function = &kernel, SUCCESS;
    return NOT_FOUND;
}
int cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
int cuLaunchKernel(const cushim::Kernel* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned,
                   Stream* stream, void** params, void**) {
    ONE_AT_A_TIME;
    launches++;
    const std::shared_ptr<char> args(room(kernel->args_size), free);
    memcpy(args.get(), params[0], kernel->args_size);
    put(stream, [=] {
        const unsigned grid[3] = {x, y, z};
        char message[256] = "";
        if (!cuda_on_host_launch(kernel->name, args.get(), kernel->args_size, grid, threads, 0, message, sizeof message)) return;
        fprintf(stderr, "%s: %s\n", kernel->name, message);
        abort();
    });
    return SUCCESS;
}
}
