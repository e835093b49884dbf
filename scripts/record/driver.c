/* Evaluates token ids with the shared libraries of any llama.cpp since 2024, and decodes further ones.
 *
 *   gcc -O1 -o driver driver.c -ldl
 *   driver LIBRARIES MODEL PREFILL TOKEN…      the first PREFILL tokens in one batch, the others one by one
 *   gcc -O1 -DLINKED -o linked driver.c -Wl,--no-as-needed LIBRARIES/libllama.* -ldl      is bound to llama.cpp's functions by the loader
 *
 * PREFILL may be several batches: 20,9,4, or a whole life of the context (see `life` below). In the environment, DRIVER_FLASH=on|off asks for flash attention or for
 * none, DRIVER_CACHE=TYPE for keys and values of another ggml type, by its number (0 is F32, 8 is Q8_0), or
 * DRIVER_CACHE=TYPE,TYPE for keys and values of two types,
 * DRIVER_CONTEXT=N for room for so many tokens (default 512), DRIVER_UBATCH=N for so many at a time (default 512),
 * DRIVER_THREADS=N for so many threads (default 2), DRIVER_GPU_LAYERS=N for so many layers on a GPU (default: as llama.cpp has it).
 * DRIVER_LORA=FILE[:SCALE],… for adapters, LLAMA_ARG_RPC=HOST:PORT for a ggml-rpc-server that computes.
 * DRIVER_EMBEDDINGS=P asks for embeddings, pooled in llama.cpp's way number P (0 none, 1 mean, 2 first row, 3 last row), and for
 * logits no more. DRIVER_DRAFT=MODEL makes a second context, of that model; DRIVER_ROLLBACK=N keeps so many states of recurrent
 * models to go back to. DRIVER_TIMES=1 says what a decode step takes: all but the first eight.
 * DRIVER_SEQUENCES=N makes room for so many sequences (default 1), DRIVER_UNIFIED=1 in one cache for all of them,
 * DRIVER_SWA=0 with a cache of the window alone where attention has one.
 * DRIVER_NOISE=NAME disturbs the first element of the node that llama.cpp calls so, each time that it was computed and by
 * another amount in each run: what a race, or memory that nobody wrote, does to whoever reads it.
 *
 * No header is needed: parameter structs go by value as opaque blocks, of which only n_ctx, n_batch and
 * n_ubatch (the first three words, in every release) are set. Symbols are looked up the way a program that
 * links the libraries would find them, so a preloaded library can stand in for them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct { char bytes[1024]; } params;
/* Releases before 2025 have more fields behind: zero. */
typedef struct {
    int32_t n_tokens, *token; float *embd; int32_t *pos, *n_seq_id, **seq_id; int8_t *logits; char rest[32];
} batch;

#ifdef LINKED
#define MEMORY(X, of) X(of##_seq_rm) X(of##_seq_cp) X(of##_seq_keep) X(of##_seq_add) X(of##_clear)
#define FUNCTIONS(X) X(llama_decode) X(llama_encode) X(llama_init_from_model) X(llama_new_context_with_model) X(ggml_backend_load_all_from_path) \
    MEMORY(X, llama_memory) MEMORY(X, llama_kv_self) MEMORY(X, llama_kv_cache)
#define DECLARED(name) extern __attribute__((weak)) void name(void);
#define LISTED(name) {#name, name},
FUNCTIONS(DECLARED)
/* What the loader has bound, as in a program that is written with llama.h; NULL where a release has no such function. */
static const struct { const char *name; void (*function)(void); } linked[] = {FUNCTIONS(LISTED)};
#else
static const struct { const char *name; void (*function)(void); } linked[1];
#endif

static void *look_up(const char *name) {
    for (size_t i = 0; i < sizeof linked / sizeof *linked; i++)
        if (linked[i].name && !strcmp(linked[i].name, name)) return (void *)*(void (*const volatile *)(void))&linked[i].function;
    return dlsym(RTLD_DEFAULT, name);
}

static void *find(const char *name, const char *older) {
    void *symbol = look_up(name);
    return !symbol && older ? look_up(older) : symbol;
}

/* Loads the library of the folder whose name begins so, for everyone to see. */
static void load(const char *prefix) {
    DIR *folder = opendir(".");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[300];
        snprintf(path, sizeof path, "./%s", entry->d_name);
        if (strncmp(entry->d_name, prefix, strlen(prefix)) == 0 && !dlopen(path, RTLD_NOW | RTLD_GLOBAL))
            fprintf(stderr, "%s\n", dlerror());
    }
    if (folder) closedir(folder);
}

static int evaluate(int (*decode)(void *, batch), void *context, int32_t *tokens, int first, int n) {
    static int32_t pos[4096], one[4096], zero;
    static int32_t *ids[4096];
    static int8_t logits[4096];
    for (int i = 0; i < n; i++) pos[i] = first + i, one[i] = 1, ids[i] = &zero, logits[i] = i == n - 1;
    batch b = {.n_tokens = n, .token = tokens + first, .pos = pos, .n_seq_id = one, .seq_id = ids, .logits = logits};
    return decode(context, b);
}

/* The scaling of RoPE, the pooling, the kind of attention and flash attention are four words that are -1 (not chosen, or
 * chosen by itself) in every release that has the last. */
static int choose_word(params *p, int at, int value) {
    int32_t *words = (int32_t *)p->bytes;
    for (int i = 3; i < 24; i++)
        if (words[i] == -1 && words[i - 1] == -1 && words[i - 2] == -1 && words[i - 3] == -1)
            return words[i - 3 + at] = value, 0;
    return fprintf(stderr, "this release has no choice of flash attention\n"), 2;
}

/* States to go back to are the first word behind the four that all releases begin with, where it is not one of the two numbers
 * of threads. */
static int choose_rollback(params *p, int states) {
    int32_t *words = (int32_t *)p->bytes;
    if (words[4] != 0) return fprintf(stderr, "this release keeps no states to go back to\n"), 2;
    return words[4] = states, 0;
}

/* The types of keys and values are the first two words after the two pointers of the callback, both F16 (1). */
static int choose_cache(params *p, const char *types) {
    int32_t *words = (int32_t *)p->bytes;
    const char *second = strchr(types, ',');
    for (int i = 16; i < 48; i += 2)
        if (words[i] == 1 && words[i + 1] == 1)
            return words[i] = atoi(types), words[i + 1] = atoi(second ? second + 1 : types), 0;
    return fprintf(stderr, "this release has no choice of the cache's type\n"), 2;
}

static const char *(*name_of)(void *);
static void (*read_bytes)(void *, void *, size_t, size_t), (*write_bytes)(void *, const void *, size_t, size_t);

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

/* An eval callback that asks for one node, and changes it. */
static bool disturb(void *tensor, bool ask, void *name) {
    if (strcmp(name_of(tensor), name)) return false;
    if (ask) return true;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    float value;
    read_bytes(tensor, &value, 0, sizeof value);
    value += 1 + now.tv_nsec % 1000003 * 1e-6f;
    write_bytes(tensor, &value, 0, sizeof value);
    return true;
}

/* The callback and its data are the two pointers before the types of keys and values. */
static int choose_noise(params *p, const char *name) {
    int32_t *words = (int32_t *)p->bytes;
    bool (*callback)(void *, bool, void *) = disturb;
    name_of = find("ggml_get_name", NULL);
    read_bytes = find("ggml_backend_tensor_get", NULL);
    write_bytes = find("ggml_backend_tensor_set", NULL);
    for (int i = 16; i < 48; i += 2)
        if (words[i] == 1 && words[i + 1] == 1 && name_of && read_bytes && write_bytes) {
            memcpy(words + i - 4, &callback, sizeof callback);
            memcpy(words + i - 2, &name, sizeof name);
            return 0;
        }
    return fprintf(stderr, "this release has no eval callback\n"), 2;
}

/* Adapters for a context, by either call that releases have had for them. */
static int adapt(void *model, void *context, char *files) {
    void *(*load_adapter)(void *, const char *) = find("llama_adapter_lora_init", "llama_lora_adapter_init");
    int (*set_all)(void *, void **, size_t, float *) = find("llama_set_adapters_lora", NULL);
    int (*set_one)(void *, void *, float) = find("llama_set_adapter_lora", "llama_lora_adapter_set");
    void *adapters[8];
    float scales[8];
    size_t n = 0;
    for (char *file = strtok(files, ","); file && n < 8; file = strtok(NULL, ","), n++) {
        char *colon = strrchr(file, ':');
        scales[n] = colon ? strtof(colon + 1, NULL) : 1;
        if (colon) *colon = 0;
        adapters[n] = load_adapter ? load_adapter(model, file) : NULL;
        if (!adapters[n]) return fprintf(stderr, "%s: no adapter\n", file), 2;
    }
    if (set_all) return set_all(context, adapters, n, scales);
    for (size_t i = 0; i < n; i++)
        if (!set_one || set_one(context, adapters[i], scales[i])) return 2;
    return 0;
}

/* Registers the devices of a ggml-rpc-server, as llama.cpp's tools do with --rpc; models go to such devices by themselves. */
static int remote(const char *server) {
    void *(*backend)(const char *) = find("ggml_backend_reg_by_name", NULL);
    void *(*function)(void *, const char *) = find("ggml_backend_reg_get_proc_address", NULL);
    void (*announce)(void *) = find("ggml_backend_register", NULL);
    void *rpc = backend && function && announce ? backend("RPC") : NULL;
    void *(*add)(const char *) = rpc ? (void *(*)(const char *))function(rpc, "ggml_backend_rpc_add_server") : NULL;
    void *added = add ? add(server) : NULL;
    if (!added) return fprintf(stderr, "%s: no devices, or these libraries have no RPC\n", server), 2;
    return announce(added), 0;
}

/* Switches are bytes behind the types of keys and values and two pointers: embeddings, offload_kqv, no_perf, op_offload,
 * swa_full, kv_unified. */
static int choose_switch(params *p, int at, int on) {
    int32_t *words = (int32_t *)p->bytes;
    for (int i = 16; i < 48; i += 2)
        if (words[i] == 1 && words[i + 1] == 1 && !memcmp((char *)(words + i + 6) + 1, "\1\1\1", 3))
            return ((char *)(words + i + 6))[at] = on, 0;
    return fprintf(stderr, "this release has no such switch\n"), 2;
}

/* The life of a context, one word after the other:
 *   b0:5,1+2:3   one batch: the next five tokens of sequence 0, and three that sequences 1 and 2 share
 *   r0@5         sequence 0 forgets what is at position 5 and behind (seq_rm)
 *   s0@1,4       the same of positions 1 to 3, and what is behind moves there (seq_rm, seq_add)
 *   c0>1         sequence 1 gets what sequence 0 has (seq_cp)
 *   k0           all but sequence 0 are forgotten (seq_keep)
 *   w0 l2        what sequence 0 has is saved, and loaded as sequence 2; W and L all of the context
 *   x            all is forgotten (clear)
 *   e0:5         a batch for the encoder
 *   m1 m0        what follows happens in the context of the second model, and in that of the first
 * Tokens are those of the command line, again from the first behind the last; every batch asks for the logits of the last row
 * of each of its parts. */
static struct {
    void *contexts[2], *context;
    int (*decode)(void *, batch), (*encode)(void *, batch);
    int32_t *tokens, n, used[2], next[2][64], of;
} now;

static int life_batch(int (*compute)(void *, batch), char *at) {
    static int32_t token[4096], pos[4096], count[4096], ids[4096][8], *list[4096];
    static int8_t logits[4096];
    int n = 0, one[8];
    /* What is encoded begins at the first position, whatever was decoded. */
    static int32_t encoded[64];
    int32_t *next = compute == now.encode ? memset(encoded, 0, sizeof encoded) : now.next[now.of];
    while (*at) {
        int of = 0;
        do one[of++] = strtol(at, &at, 10); while (*at == '+' && at++ && of < 8);
        if (*at != ':') return fprintf(stderr, "%s: no part of a batch\n", at), 2;
        int rows = strtol(at + 1, &at, 10);
        for (int i = 0; i < rows && n < 4096; i++, n++) {
            token[n] = now.tokens[now.used[now.of]++ % now.n];
            pos[n] = next[one[0]];
            for (int s = 0; s < of; s++) ids[n][s] = one[s], next[one[s]] = pos[n] + 1;
            count[n] = of, list[n] = ids[n], logits[n] = i == rows - 1;
        }
        at += *at == ',';
    }
    batch b = {.n_tokens = n, .token = token, .pos = pos, .n_seq_id = count, .seq_id = list, .logits = logits};
    int status = compute(now.context, b);
    return status ? fprintf(stderr, "the batch failed: %d\n", status), 1 : 0;
}

static int life(char *script) {
    /* Releases before 2025 have these of the context itself. */
    void *(*memory_of)(void *) = find("llama_get_memory", NULL);
    void *memory = memory_of ? memory_of(now.context) : now.context;
    #define CALL(name) find(memory_of ? "llama_memory_" name : dlsym(RTLD_DEFAULT, "llama_kv_self_update") \
                            ? "llama_kv_self_" name : "llama_kv_cache_" name, NULL)
    bool (*rm)(void *, int32_t, int32_t, int32_t) = CALL("seq_rm");
    void (*cp)(void *, int32_t, int32_t, int32_t, int32_t) = CALL("seq_cp"), (*keep)(void *, int32_t) = CALL("seq_keep");
    void (*add)(void *, int32_t, int32_t, int32_t, int32_t) = CALL("seq_add"), (*clear)(void *, bool) = CALL("clear");
    size_t (*size)(void *) = find("llama_state_get_size", NULL), (*save)(void *, void *, size_t) = find("llama_state_get_data", NULL);
    size_t (*load)(void *, const void *, size_t) = find("llama_state_set_data", NULL);
    size_t (*size_of)(void *, int32_t) = find("llama_state_seq_get_size", NULL);
    size_t (*save_of)(void *, void *, size_t, int32_t) = find("llama_state_seq_get_data", NULL);
    size_t (*load_of)(void *, const void *, size_t, int32_t) = find("llama_state_seq_set_data", NULL);
    if (!rm || !cp || !keep || !add || !clear || !size || !save || !load || !size_of || !save_of || !load_of)
        return fprintf(stderr, "this release has no such life\n"), 2;
    static char kept[1 << 26];
    size_t bytes = 0;
    int32_t saved[64], was = 0, *next = now.next[0];
    for (char *word = strtok(script, " "); word; word = strtok(NULL, " ")) {
        int a = 0, b = 0, c = 0, status = 0;
        sscanf(word + 1, "%d%*[@>]%d,%d", &a, &b, &c);
        switch (*word) {
        case 'b': status = life_batch(now.decode, word + 1); break;
        case 'e': status = now.encode ? life_batch(now.encode, word + 1) : 2; break;
        case 'm':
            if (a < 0 || a > 1 || !now.contexts[a]) return fprintf(stderr, "%s: no such context\n", word), 2;
            now.context = now.contexts[now.of = a], next = now.next[a];
            memory = memory_of ? memory_of(now.context) : now.context;
            break;
        case 'r': status = !rm(memory, a, b, -1), next[a] = b; break;
        case 's': status = !rm(memory, a, b, c), add(memory, a, c, -1, b - c), next[a] -= c - b; break;
        case 'c': cp(memory, a, b, -1, -1), next[b] = next[a]; break;
        case 'k': keep(memory, a); break;
        case 'x': clear(memory, true), memset(next, 0, sizeof now.next[0]); break;
        case 'w': bytes = save_of(now.context, kept, sizeof kept, a), was = next[a]; break;
        case 'l': status = !load_of(now.context, kept, bytes, a), next[a] = was; break;
        case 'W': bytes = save(now.context, kept, sizeof kept), memcpy(saved, next, sizeof saved); break;
        case 'L': status = !load(now.context, kept, bytes), memcpy(next, saved, sizeof saved); break;
        default: status = 2;
        }
        if (status) return fprintf(stderr, "%s: failed\n", word), status;
    }
    return 0;
}

/* How many layers, the last ones, are on the GPU: the first number of a model's parameters, behind two pointers that are null where
 * nobody chose devices (in front since the middle of 2025). */
static void choose_layers(params *p, int32_t layers) {
    static const char none[2 * sizeof(void *)];
    size_t at = memcmp(p->bytes, none, sizeof none) == 0 ? sizeof none : 0;
    memcpy(p->bytes + at, &layers, sizeof layers);
}

/* A number of the environment that is above 0. */
static int number(const char *name, int otherwise) {
    int value = getenv(name) ? atoi(getenv(name)) : otherwise;
    return value > 0 ? value : otherwise;
}

int main(int argc, char **argv) {
    if (argc < 5) return fprintf(stderr, "driver LIBRARIES MODEL PREFILL TOKEN…\n"), 2;
    char *model_path = realpath(argv[2], NULL);
    char lora[4096] = "", *given = getenv("DRIVER_LORA"), here[2048];
    for (; given && *given && getcwd(here, sizeof here); given += strcspn(given, ","), given += *given == ',') {
        int length = strcspn(given, ","), begun = strlen(lora);
        snprintf(lora + begun, sizeof lora - begun, "%s%s%s%.*s", begun ? "," : "", *given == '/' ? "" : here,
                 *given == '/' ? "" : "/", length, given);
    }
    const char *draft = getenv("DRIVER_DRAFT");
    if (draft && !(draft = realpath(draft, NULL))) return perror("DRIVER_DRAFT"), 2;
    if (!model_path || chdir(argv[1])) return perror(argv[1]), 2;
    load("libggml-base.");
    load("libggml.");
    load("libllama.");
    void (*load_backends)(const char *) = find("ggml_backend_load_all_from_path", NULL);
    if (load_backends) load_backends(".");
    void (*init)(void) = find("llama_backend_init", NULL);
    params (*model_params)(void) = find("llama_model_default_params", NULL);
    params (*context_params)(void) = find("llama_context_default_params", NULL);
    void *(*load_model)(const char *, params) = find("llama_model_load_from_file", "llama_load_model_from_file");
    void *(*new_context)(void *, params) = find("llama_init_from_model", "llama_new_context_with_model");
    void (*threads)(void *, int32_t, int32_t) = find("llama_set_n_threads", NULL);
    int (*decode)(void *, batch) = find("llama_decode", NULL);
    float *(*last)(void *, int32_t) = find("llama_get_logits_ith", NULL);
    if (!init || !model_params || !context_params || !load_model || !new_context || !threads || !decode || !last)
        return fprintf(stderr, "these libraries are no llama.cpp\n"), 2;
    init();
    const char *server = getenv("LLAMA_ARG_RPC");
    if (server && remote(server)) return 2;
    params of_model = model_params();
    if (getenv("DRIVER_GPU_LAYERS")) choose_layers(&of_model, atoi(getenv("DRIVER_GPU_LAYERS")));
    void *model = load_model(model_path, of_model);
    if (!model) return fprintf(stderr, "%s: no model\n", model_path), 2;
    params p = context_params();
    uint32_t sizes[4] = {number("DRIVER_CONTEXT", 512), number("DRIVER_CONTEXT", 512), number("DRIVER_UBATCH", 512), number("DRIVER_SEQUENCES", 1)};
    memcpy(&p, sizes, sizeof sizes);
    const char *flash = getenv("DRIVER_FLASH"), *cache = getenv("DRIVER_CACHE"), *noise = getenv("DRIVER_NOISE");
    if (noise && choose_noise(&p, noise)) return 2;
    if (flash && choose_word(&p, 3, strcmp(flash, "off") != 0)) return 2;
    const char *pooling = getenv("DRIVER_EMBEDDINGS"), *states = getenv("DRIVER_ROLLBACK");
    if (pooling && (choose_word(&p, 1, atoi(pooling)) || choose_switch(&p, 0, 1))) return 2;
    if (states && choose_rollback(&p, atoi(states))) return 2;
    if (getenv("DRIVER_UNIFIED") && choose_switch(&p, 5, atoi(getenv("DRIVER_UNIFIED")))) return 2;
    if (getenv("DRIVER_SWA") && choose_switch(&p, 4, atoi(getenv("DRIVER_SWA")))) return 2;
    if (cache && choose_cache(&p, cache)) return 2;
    void *context = new_context(model, p);
    if (!context) return fprintf(stderr, "no context\n"), 2;
    if (draft) {
        void *second = load_model(draft, model_params());
        now.contexts[1] = second ? new_context(second, p) : NULL;
        if (!now.contexts[1]) return fprintf(stderr, "%s: no model\n", draft), 2;
        threads(now.contexts[1], number("DRIVER_THREADS", 2), number("DRIVER_THREADS", 2));
    }
    if (lora[0] && adapt(model, context, lora)) return 2;
    int n_threads = number("DRIVER_THREADS", 2);
    threads(context, n_threads, n_threads);
    int n = argc - 4, done = 0, status = 0;
    int32_t tokens[4096];
    for (int i = 0; i < n && i < 4096; i++) tokens[i] = atoi(argv[4 + i]);
    now.contexts[0] = now.context = context, now.decode = decode, now.encode = (int (*)(void *, batch))find("llama_encode", NULL),
    now.tokens = tokens, now.n = n;
    int is_life = strchr(argv[3], ':') != NULL;
    if (is_life && (status = life(argv[3]))) return status;
    for (char *at = is_life ? "" : argv[3]; *at; at += *at == ',') {
        int batch = strtol(at, &at, 10);
        if (batch < 1 || batch > n - done) return fprintf(stderr, "%s: no batches of %d tokens\n", argv[3], n), 2;
        if (evaluate(decode, context, tokens, done, batch)) return fprintf(stderr, "the prefill failed\n"), 1;
        done += batch;
    }
    double since = 0;
    for (int i = is_life ? n : done; i < n; i++) {
        if (i == done + 8) last(context, -1), since = milliseconds();
        if (evaluate(decode, context, tokens, i, 1)) return fprintf(stderr, "decoding failed\n"), 1;
    }
    if (getenv("DRIVER_TIMES") && since > 0) {
        last(context, -1); /* It waits for the last of them. */
        printf("a decode step takes %.3f ms\n", (milliseconds() - since) / (n - done - 8));
    }
    if (pooling) {
        float *(*row)(void *, int32_t) = (float *(*)(void *, int32_t))find("llama_get_embeddings_ith", NULL);
        float *(*whole)(void *, int32_t) = (float *(*)(void *, int32_t))find("llama_get_embeddings_seq", NULL);
        float *embedding = atoi(pooling) ? whole(context, 0) : row(context, -1);
        return printf("first value %.6f\n", embedding ? embedding[0] : 0), !embedding;
    }
    /* All bits of the last row, as FNV-1a hashes them. */
    const void *(*vocabulary_of)(void *) = find("llama_model_get_vocab", NULL);
    int32_t (*size)(const void *) = find("llama_vocab_n_tokens", "llama_n_vocab");
    float *row = last(context, -1);
    uint64_t bits = 14695981039346656037u;
    size_t bytes = size ? size(vocabulary_of ? vocabulary_of(model) : model) * sizeof *row : sizeof *row;
    for (size_t i = 0; i < bytes; i++) bits = (bits ^ ((unsigned char *)row)[i]) * 1099511628211u;
    printf("last logit %.6f of bits %016llx\n", row[0], (unsigned long long)bits);
    return 0;
}
