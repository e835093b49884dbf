/* Encodes images as clip.cpp does, with the shared libraries of any llama.cpp since 2025: a graph without tokens and without a cache,
 * through ggml's scheduler.
 *
 *   gcc -O1 -o tower tower.c -ldl
 *   tower LIBRARIES MODEL IMAGES      MODEL is the tower.gguf of encoders.py, IMAGES how many random images it gets
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct ggml_tensor tensor;
enum { WIDTH = 64, HEADS = 4, PATCH = 8, SIDE = 32, PATCHES = (SIDE / PATCH) * (SIDE / PATCH), LAYERS = 2 };

static void load(const char *start) {
    DIR *folder = opendir(".");
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (!strncmp(entry->d_name, start, strlen(start))) {
            char path[300];
            snprintf(path, sizeof path, "./%s", entry->d_name);
            if (!dlopen(path, RTLD_NOW | RTLD_GLOBAL)) fprintf(stderr, "%s\n", dlerror());
        }
    if (folder) closedir(folder);
}

static void *find(const char *name) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    if (!symbol) fprintf(stderr, "these libraries have no %s\n", name), exit(2);
    return symbol;
}

static void *weights, *graph_memory;
static tensor *weight(const char *format, int layer) {
    char name[64];
    snprintf(name, sizeof name, format, layer);
    tensor *found = ((tensor * (*)(void *, const char *))find("ggml_get_tensor"))(weights, name);
    if (!found) fprintf(stderr, "the model has no %s\n", name), exit(2);
    return found;
}

#define OP(name, ...) ((tensor * (*)()) find("ggml_" #name))(graph_memory, __VA_ARGS__)
static tensor *named(tensor *x, const char *name, int layer) {
    char full[64];
    snprintf(full, sizeof full, layer < 0 ? "%s" : "%s-%d", name, layer);
    return ((tensor * (*)(tensor *, const char *))find("ggml_set_name"))(x, full);
}
static tensor *scaled_norm(tensor *x, const char *part, int layer) {
    char of[2][64];
    snprintf(of[0], 64, "%s.weight", part), snprintf(of[1], 64, "%s.bias", part);
    tensor *norm = ((tensor * (*)(void *, tensor *, float))find("ggml_norm"))(graph_memory, x, 1e-6f);
    return OP(add, OP(mul, norm, weight(of[0], layer)), weight(of[1], layer));
}
static tensor *product(tensor *x, const char *part, int layer) {
    char of[2][64];
    snprintf(of[0], 64, "%s.weight", part), snprintf(of[1], 64, "%s.bias", part);
    return OP(add, OP(mul_mat, weight(of[0], layer), x), weight(of[1], layer));
}
#define I(n) ((int64_t)(n))
static tensor *heads(tensor *x) { return OP(reshape_3d, x, I(WIDTH / HEADS), I(HEADS), I(PATCHES)); }

static tensor *layer(tensor *x, int n) {
    tensor *in = named(scaled_norm(x, "v.blk.%d.ln1", n), "ln1", n);
    tensor *q = named(heads(product(in, "v.blk.%d.attn_q", n)), "Qcur", n);
    tensor *k = named(heads(product(in, "v.blk.%d.attn_k", n)), "Kcur", n);
    tensor *v = named(heads(product(in, "v.blk.%d.attn_v", n)), "Vcur", n);
    q = OP(permute, q, 0, 2, 1, 3), k = OP(permute, k, 0, 2, 1, 3);
    v = OP(cont, OP(permute, v, 1, 2, 0, 3));
    tensor *scores = OP(mul_mat, k, q);
    scores = ((tensor * (*)(void *, tensor *, tensor *, float, float))find("ggml_soft_max_ext"))(graph_memory, scores, NULL, 0.25f, 0.0f);
    tensor *context = OP(permute, OP(mul_mat, v, scores), 0, 2, 1, 3);
    context = named(OP(cont_2d, context, I(WIDTH), I(PATCHES)), "kqv_out", n);
    x = named(OP(add, x, product(context, "v.blk.%d.attn_out", n)), "attn_residual", n);
    in = named(scaled_norm(x, "v.blk.%d.ln2", n), "ln2", n);
    in = named(OP(gelu, product(in, "v.blk.%d.ffn_up", n)), "ffn_gelu", n);
    return named(OP(add, x, product(in, "v.blk.%d.ffn_down", n)), "layer_out", n);
}

int main(int argc, char **argv) {
    char *model = argc == 4 ? realpath(argv[2], NULL) : NULL;
    if (!model || chdir(argv[1])) return fprintf(stderr, "tower LIBRARIES MODEL IMAGES\n"), 2;
    load("libggml-base.");
    load("libggml.");
    ((void (*)(const char *))find("ggml_backend_load_all_from_path"))(".");
    struct { bool no_alloc; void **context; } read = {false, &weights};
    void *(*open)(const char *, __typeof__(read)) = find("gguf_init_from_file");
    if (!open(model, read)) return fprintf(stderr, "%s: no model\n", model), 2;
    void *(*backend_of)(int, const char *) = find("ggml_backend_init_by_type");
    void *backend = backend_of(0, NULL);
    void *(*scheduler)(void **, void **, int, size_t, bool, bool) = find("ggml_backend_sched_new");
    void *sched = scheduler(&backend, NULL, 1, 2048, false, true);
    struct { size_t size; void *memory; bool no_alloc; } sizes = {1 << 22, NULL, true};
    void *(*init)(__typeof__(sizes)) = find("ggml_init");
    graph_memory = init(sizes);
    tensor *image = named(OP(new_tensor_3d, 0, I(SIDE), I(SIDE), I(3)), "inp_raw", -1);
    ((void (*)(tensor *))find("ggml_set_input"))(image);
    tensor *x = OP(conv_2d, weight("v.patch_embd.weight", 0), image, PATCH, PATCH, 0, 0, 1, 1);
    x = OP(cont, OP(transpose, OP(reshape_2d, x, I(PATCHES), I(WIDTH))));
    x = named(OP(add, x, weight("v.patch_embd.bias", 0)), "patch_bias", -1);
    x = named(OP(add, x, weight("v.position_embd.weight", 0)), "pos_embed", -1);
    for (int n = 0; n < LAYERS; n++) x = layer(x, n);
    x = OP(mul_mat, weight("mm.0.weight", 0), named(scaled_norm(x, "v.post_ln", 0), "post_ln", -1));
    x = named(x, "projected", -1);
    void *graph = ((void *(*)(void *))find("ggml_new_graph"))(graph_memory);
    ((void (*)(void *, tensor *))find("ggml_build_forward_expand"))(graph, x);
    bool (*reserve)(void *, void *) = find("ggml_backend_sched_reserve"), (*lay_out)(void *, void *) = find("ggml_backend_sched_alloc_graph");
    int (*compute)(void *, void *) = find("ggml_backend_sched_graph_compute");
    void (*reset)(void *) = find("ggml_backend_sched_reset");
    void (*set)(tensor *, const void *, size_t, size_t) = find("ggml_backend_tensor_set");
    void (*get)(tensor *, void *, size_t, size_t) = find("ggml_backend_tensor_get");
    if (!reserve(sched, graph)) return fprintf(stderr, "no memory\n"), 1;
    float pixels[3 * SIDE * SIDE], first = 0;
    srand(1);
    for (int n = atoi(argv[3]); n > 0; n--) {
        for (int i = 0; i < 3 * SIDE * SIDE; i++) pixels[i] = rand() / (float)RAND_MAX * 2 - 1;
        reset(sched);
        if (!lay_out(sched, graph)) return fprintf(stderr, "no memory\n"), 1;
        set(image, pixels, 0, sizeof pixels);
        if (compute(sched, graph)) return fprintf(stderr, "the pass failed\n"), 1;
        get(x, &first, 0, sizeof first);
        printf("first value %.6f\n", first);
    }
    return 0;
}
