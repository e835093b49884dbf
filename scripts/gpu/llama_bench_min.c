/* Prefill and decode speed of the shared libraries of any llama.cpp, as it is and with every node asked for and
 * read back through the eval callback.
 *
 *   cc -O2 -rdynamic -o llama_bench_min llama_bench_min.c -ldl
 *   cd LIBRARIES && LD_LIBRARY_PATH=. llama_bench_min ./libggml.so ./libllama.so MODEL [PREFILLS [CONTEXTS [RUNS]]]
 *
 * PREFILLS: their lengths in tokens (default 16,128,512); CONTEXTS: positions before the first decoded token (default 8);
 * RUNS: how often each is measured (default: prefill 7 times, decode 5), behind two or one that are not.
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

enum { RUNS_MAX = 99, STEPS = 128, STEPS_TAPPED = 16, LARGEST_NODE = 1 << 30, LENGTHS_MAX = 32 };
enum { BATCH = 2048, UBATCH = 512 };

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

/* Lengths, at most LENGTHS_MAX, as `16,128`: how many. */
static int lengths_of(char *text, int *lengths) {
    int n = 0;
    for (char *word = strtok(text, ","); word && n < LENGTHS_MAX; word = strtok(NULL, ",")) lengths[n++] = atoi(word);
    return n;
}

/* Bytes that nobody has taken in the memory of all GPUs; -1 where there is none, or a llama.cpp that cannot say. */
static int64_t free_memory(void) {
    enum { IS_GPU = 1 };
    size_t (*count)(void) = dlsym(RTLD_DEFAULT, "ggml_backend_dev_count");
    void *(*get)(size_t) = dlsym(RTLD_DEFAULT, "ggml_backend_dev_get");
    int (*type_of)(void *) = dlsym(RTLD_DEFAULT, "ggml_backend_dev_type");
    void (*memory_of)(void *, size_t *, size_t *) = dlsym(RTLD_DEFAULT, "ggml_backend_dev_memory");
    int64_t sum = -1;
    if (!count || !get || !type_of || !memory_of) return sum;
    for (size_t i = 0; i < count(); i++) {
        size_t left = 0, all = 0;
        if (type_of(get(i)) != IS_GPU) continue;
        memory_of(get(i), &left, &all);
        sum = (sum < 0 ? 0 : sum) + (int64_t)left;
    }
    return sum;
}

static int (*decode)(void *, batch);
static void (*synchronize)(void *);
static batch (*batch_of)(int32_t *, int32_t);
static void (*clear)(void *, bool);
static bool (*cut)(void *, int32_t, int32_t, int32_t);
static void *context, *memory;
static int32_t *tokens;
static int prefill_runs = 7, decode_runs = 5;

/* So many tokens at once; what is more than a batch in several. */
static int prefill(int n) {
    clear(memory, true);
    for (int at = 0; at < n; at += BATCH)
        if (decode(context, batch_of(tokens + at, n - at < BATCH ? n - at : BATCH))) return 1;
    synchronize(context);
    return 0;
}

static int measure_prefill(int n) {
    double times[RUNS_MAX];
    for (int run = -2; run < prefill_runs; run++) {
        nodes = bytes = 0;
        double start = now();
        if (prefill(n)) return 1;
        if (run >= 0) times[run] = now() - start;
    }
    qsort(times, (size_t)prefill_runs, sizeof *times, ascending);
    double median = times[prefill_runs / 2];
    printf("tap=%d pp%d median %.3f ms %.0f tok/s (min %.3f max %.3f) nodes=%ld bytes=%ld\n", tapped, n, 1e3 * median,
           n / median, 1e3 * times[0], 1e3 * times[prefill_runs - 1], nodes, bytes);
    return 0;
}

/* Steps of one token after `n` positions. */
static int measure_decode(int n) {
    const bool asked = tapped;
    const int steps = asked ? STEPS_TAPPED : STEPS;
    double times[RUNS_MAX];
    tapped = false;
    if (prefill(n)) return 1;
    tapped = asked;
    for (int run = -1; run < decode_runs; run++) {
        if (!cut(memory, 0, n, -1)) return 1;
        double start = now();
        for (int i = 0; i < steps; i++) {
            if (decode(context, batch_of(tokens + i, 1))) return 1;
            synchronize(context);
        }
        if (run >= 0) times[run] = (now() - start) / steps;
    }
    qsort(times, (size_t)decode_runs, sizeof *times, ascending);
    double median = times[decode_runs / 2];
    printf("tap=%d tg@%d median %.3f ms/tok %.1f tok/s\n", tapped, n, 1e3 * median, 1 / median);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4 || argc > 7) return fprintf(stderr, "llama_bench_min LIBGGML LIBLLAMA MODEL [PREFILLS [CONTEXTS [RUNS]]]\n"), 2;
    char usual_prompts[] = "16,128,512", usual_contexts[] = "8";
    int prompts[LENGTHS_MAX], contexts[LENGTHS_MAX], longest = 0;
    const int n_prompts = lengths_of(argc > 4 ? argv[4] : usual_prompts, prompts);
    const int n_contexts = lengths_of(argc > 5 ? argv[5] : usual_contexts, contexts);
    if (argc > 6) prefill_runs = decode_runs = atoi(argv[6]);
    if (prefill_runs < 1 || prefill_runs > RUNS_MAX) return fprintf(stderr, "1 to %d runs, not %s\n", RUNS_MAX, argv[6]), 2;
    for (int i = 0; i < n_prompts; i++) longest = prompts[i] > longest ? prompts[i] : longest;
    for (int i = 0; i < n_contexts; i++) longest = contexts[i] > longest ? contexts[i] : longest;
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
    decode = dlsym(llama, "llama_decode");
    synchronize = dlsym(llama, "llama_synchronize");
    batch_of = dlsym(llama, "llama_batch_get_one");
    void *(*memory_of)(void *) = dlsym(llama, "llama_get_memory");
    clear = dlsym(llama, "llama_memory_clear");
    cut = dlsym(llama, "llama_memory_seq_rm");
    if (!node_bytes || !read_node || !load || !init || !model_params || !context_params || !load_model || !new_context
        || !decode || !synchronize || !batch_of || !memory_of || !clear || !cut)
        return fprintf(stderr, "these libraries are no llama.cpp of 2025 or later\n"), 2;
    load(".");
    init();
    const int64_t memory_before = free_memory();
    void *model = load_model(argv[3], model_params());
    if (!model) return fprintf(stderr, "%s: no model\n", argv[3]), 2;
    params p = context_params();
    uint32_t sizes[3] = {(uint32_t)(longest + STEPS + 255) / 256 * 256, BATCH, UBATCH};
    memcpy(&p, sizes, sizeof sizes);
    context = new_context(model, p);
    if (!context) return fprintf(stderr, "no context\n"), 2;
    memory = memory_of(context);
    tokens = malloc(sizeof *tokens * (size_t)(longest + STEPS));
    for (int i = 0; i < longest + STEPS; i++) tokens[i] = (int32_t)((uint32_t)i * 7919 % 3000 + 100);
    for (int pass = 0; pass < 2; pass++) {
        tapped = pass == 1;
        for (int i = 0; i < n_prompts; i++)
            if (measure_prefill(prompts[i])) return fprintf(stderr, "a prefill of %d tokens failed\n", prompts[i]), 2;
        for (int i = 0; i < n_contexts; i++)
            if (measure_decode(contexts[i])) return fprintf(stderr, "decode after %d positions failed\n", contexts[i]), 2;
    }
    if (memory_before >= 0) printf("memory %lld bytes\n", (long long)(memory_before - free_memory()));
    return 0;
}
