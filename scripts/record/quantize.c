/* Quantises a model with the shared libraries of any llama.cpp since 2024.
 *
 *   gcc -O1 -o quantize quantize.c -ldl
 *   quantize LIBRARIES MODEL OUT FTYPE         FTYPE: the number of llama.h, e.g. 15 for Q4_K_M
 *
 * As driver.c, it needs no header: of the parameters only the first two words, threads and type, are set.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char bytes[1024]; } params;

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

int main(int argc, char **argv) {
    if (argc != 5) return fprintf(stderr, "quantize LIBRARIES MODEL OUT FTYPE\n"), 2;
    char *model = realpath(argv[2], NULL), out[4096];
    if (!model) return perror(argv[2]), 2;
    if (argv[3][0] == '/') snprintf(out, sizeof out, "%s", argv[3]);
    else {
        char here[2048];
        if (!getcwd(here, sizeof here)) return perror("."), 2;
        snprintf(out, sizeof out, "%s/%s", here, argv[3]);
    }
    if (chdir(argv[1])) return perror(argv[1]), 2;
    load("libggml-base.");
    load("libggml.");
    load("libllama.");
    void (*init)(void) = dlsym(RTLD_DEFAULT, "llama_backend_init");
    params (*defaults)(void) = dlsym(RTLD_DEFAULT, "llama_model_quantize_default_params");
    uint32_t (*quantize)(const char *, const char *, const params *) = dlsym(RTLD_DEFAULT, "llama_model_quantize");
    if (!init || !defaults || !quantize) return fprintf(stderr, "these libraries are no llama.cpp\n"), 2;
    init();
    params p = defaults();
    int32_t words[2] = {0, atoi(argv[4])}; /* as many threads as there are cores */
    memcpy(&p, words, sizeof words);
    return quantize(model, out, &p) != 0;
}
