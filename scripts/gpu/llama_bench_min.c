/* Prefill and decode speed of the shared libraries of any llama.cpp, as it is and with every node asked for and
 * read back through the eval callback.
 *
 *   cc -O2 -rdynamic -o llama_bench_min llama_bench_min.c -ldl
 *   cd LIBRARIES && LD_LIBRARY_PATH=. llama_bench_min ./libggml.so ./libllama.so MODEL
 *
 * No header is needed: parameter structs go by value as opaque blocks, of which only n_ctx, n_batch and n_ubatch
 * (the first three words, in every release) are set. The callback is put in by standing before
 * ggml_backend_sched_set_eval_callback, which every context calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PREFILL_RUNS = 7, DECODE_RUNS = 5, LARGEST_NODE = 1 << 30 };

typedef struct { char bytes[512]; } params;
typedef struct {
    int32_t n_tokens, *token; float *embd; int32_t *pos, *n_seq_id, **seq_id; int8_t *logits;
} batch;

static size_t (*node_bytes)(void *);
static void (*read_node)(void *, void *, size_t, size_t);
static char *buffer;
static long nodes, bytes;
static bool tapped;

/* Asked before each node whether it is wanted, and called after it. */
static bool node(void *tensor, bool asks, void *user) {
    (void)user;
    if (asks) return true;
    size_t n = node_bytes(tensor);
    nodes++;
    if (n >= LARGEST_NODE) return true;
    read_node(tensor, buffer, 0, n);
    bytes += (long)n;
    return true;
}

void ggml_backend_sched_set_eval_callback(void *sched, void *callback, void *user) {
    static void (*real)(void *, void *, void *);
    (void)callback, (void)user;
    if (!real) real = dlsym(RTLD_NEXT, "ggml_backend_sched_set_eval_callback");
    real(sched, tapped ? (void *)node : NULL, NULL);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "llama_bench_min LIBGGML LIBLLAMA MODEL\n"), 2;
    void *base = dlopen("libggml-base.so", RTLD_NOW | RTLD_GLOBAL), *ggml = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
    void *llama = dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL);
    if (!base || !ggml || !llama) return fprintf(stderr, "%s\n", dlerror()), 2;
    node_bytes = dlsym(base, "ggml_nbytes");
    read_node = dlsym(base, "ggml_backend_tensor_get");
    buffer = malloc(LARGEST_NODE);
    void (*load)(const char *) = dlsym(ggml, "ggml_backend_load_all_from_path");
    void (*init)(void) = dlsym(llama, "llama_backend_init");
    params (*model_params)(void) = dlsym(llama, "llama_model_default_params");
    params (*context_params)(void) = dlsym(llama, "llama_context_default_params");
    void *(*load_model)(const char *, params) = dlsym(llama, "llama_model_load_from_file");
    void *(*new_context)(void *, params) = dlsym(llama, "llama_init_from_model");
    int (*decode)(void *, batch) = dlsym(llama, "llama_decode");
    void (*synchronize)(void *) = dlsym(llama, "llama_synchronize");
    batch (*batch_of)(int32_t *, int32_t) = dlsym(llama, "llama_batch_get_one");
    void *(*memory_of)(void *) = dlsym(llama, "llama_get_memory");
    void (*clear)(void *, bool) = dlsym(llama, "llama_memory_clear");
    if (!node_bytes || !read_node || !load || !init || !model_params || !context_params || !load_model || !new_context
        || !decode || !synchronize || !batch_of || !memory_of || !clear)
        return fprintf(stderr, "these libraries are no llama.cpp of 2025 or later\n"), 2;
    load(".");
    init();
    void *model = load_model(argv[3], model_params());
    if (!model) return fprintf(stderr, "%s: no model\n", argv[3]), 2;
    params p = context_params();
    uint32_t sizes[3] = {2048, 2048, 512};
    memcpy(&p, sizes, sizeof sizes);
    void *context = new_context(model, p);
    if (!context) return fprintf(stderr, "no context\n"), 2;
    void *memory = memory_of(context);
    int32_t tokens[4096];
    for (int i = 0; i < 4096; i++) tokens[i] = i * 7919 % 3000 + 100;

    for (int pass = 0; pass < 2; pass++) {
        tapped = pass == 1;
        const int prompts[] = {16, 128, 512};
        for (int q = 0; q < 3; q++) {
            double times[PREFILL_RUNS];
            for (int run = -2; run < PREFILL_RUNS; run++) {
                clear(memory, true);
                synchronize(context);
                nodes = bytes = 0;
                double start = now();
                if (decode(context, batch_of(tokens, prompts[q]))) return 1;
                synchronize(context);
                if (run >= 0) times[run] = now() - start;
            }
            qsort(times, PREFILL_RUNS, sizeof *times, ascending);
            double median = times[PREFILL_RUNS / 2];
            printf("tap=%d pp%d median %.3f ms %.0f tok/s (min %.3f max %.3f) nodes=%ld bytes=%ld\n", pass, prompts[q],
                   1e3 * median, prompts[q] / median, 1e3 * times[0], 1e3 * times[PREFILL_RUNS - 1], nodes, bytes);
        }
        double times[DECODE_RUNS];
        int steps = tapped ? 16 : 128;
        for (int run = -1; run < DECODE_RUNS; run++) {
            clear(memory, true);
            decode(context, batch_of(tokens, 8));
            synchronize(context);
            double start = now();
            for (int i = 0; i < steps; i++) {
                if (decode(context, batch_of(tokens + i, 1))) return 1;
                synchronize(context);
            }
            if (run >= 0) times[run] = (now() - start) / steps;
        }
        qsort(times, DECODE_RUNS, sizeof *times, ascending);
        double median = times[DECODE_RUNS / 2];
        printf("tap=%d tg%d median %.3f ms/tok %.1f tok/s\n", pass, steps, 1e3 * median, 1 / median);
        fflush(stdout);
    }
    return 0;
}
