/* parity_dump.h: hands the tensors of a C, C++ or CUDA engine to parity. C99, one file, no dependency.
 *
 *     parity_dump *dump = parity_dump_open("out", "my-engine", "1.2", "f32");
 *     parity_dump_begin_step(dump, tokens, NULL, n);                        // one forward pass over n tokens
 *     parity_dump_tensor(dump, layer, "q_rope", PARITY_F32, q, n, heads, head_width);
 *     …
 *     parity_dump_end_step(dump);
 *     if (parity_dump_close(dump)) return 1;                                // says on stderr what went wrong
 *
 * then `parity diff out REFERENCE -m model.gguf` or `parity audit out -m model.gguf`. Ids and shapes: docs/dumps.md.
 *
 * Errors stick: the first one is kept, what follows does nothing, and parity_dump_close() reports it, so that no call
 * in between need be checked. All functions do nothing for a NULL dump: an engine that was not asked to dump passes
 * NULL. Not for use from several threads at once.
 *
 * On CUDA, with nvcc or with PARITY_DUMP_CUDA defined, a device pointer does as well:
 *
 *     parity_dump_device_tensor(dump, layer, "q_rope", PARITY_F16, q_device, n, heads, head_width, stream);
 */
#ifndef PARITY_DUMP_H
#define PARITY_DUMP_H

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <direct.h>
#define PARITY_DUMP_MKDIR(path) _mkdir(path)
#else
#include <sys/stat.h>
#define PARITY_DUMP_MKDIR(path) mkdir(path, 0777)
#endif

/* Element types, as they lie in memory (little-endian). */
typedef enum { PARITY_F32, PARITY_F16, PARITY_BF16 } parity_dump_type;

/* Bytes kept free for the header of a step file: some 2000 tensors; more are dealt with. */
#define PARITY_DUMP_HEADER_BYTES ((uint64_t)1 << 18)
#define PARITY_DUMP_NAME_MAX 96

/* Text that grows. */
typedef struct {
  char *data;
  size_t length, room;
} parity_dump_text;

/* The positions that a tensor has, over all steps. */
typedef struct {
  char name[PARITY_DUMP_NAME_MAX];
  int32_t *positions;
  size_t count, room;
  int partial, step;
  int64_t row[2]; /* axes of a row */
} parity_dump_rows_of;

typedef struct parity_dump {
  parity_dump_text folder, producer, steps, header;
  parity_dump_rows_of *rows;
  size_t rows_count, rows_room;
  int32_t *tokens; /* by position */
  size_t tokens_count, tokens_room;
  int32_t *positions; /* of the open step */
  size_t positions_count, positions_room;
  int32_t *next; /* of the next tensor, where parity_dump_rows() said so */
  size_t next_count, next_room;
  FILE *file; /* the open step's */
  uint64_t written;
  int step_count, complete;
  char error[512];
} parity_dump;

/* Notes the first error; returns -1. */
static inline int parity_dump_fail(parity_dump *dump, const char *format, ...) {
  va_list arguments;
  if (!dump->error[0]) {
    va_start(arguments, format);
    vsnprintf(dump->error, sizeof dump->error, format, arguments);
    va_end(arguments);
  }
  return -1;
}

/* Makes room for `count` elements of `size` bytes; returns the array, or NULL and notes the error. */
static inline void *parity_dump_grow(parity_dump *dump, void *array, size_t *room, size_t count, size_t size) {
  size_t wanted = *room ? *room : 64;
  void *grown;
  if (count <= *room) return array;
  while (wanted < count) wanted *= 2;
  if (!(grown = realloc(array, wanted * size))) parity_dump_fail(dump, "out of memory");
  else *room = wanted;
  return grown;
}

static inline int parity_dump_print(parity_dump *dump, parity_dump_text *text, const char *format, ...) {
  va_list arguments;
  char *grown;
  int length;
  va_start(arguments, format);
  length = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  if (length < 0) return parity_dump_fail(dump, "text cannot be written");
  grown = (char *)parity_dump_grow(dump, text->data, &text->room, text->length + (size_t)length + 1, 1);
  if (!grown) return -1;
  text->data = grown;
  va_start(arguments, format);
  vsnprintf(text->data + text->length, (size_t)length + 1, format, arguments);
  va_end(arguments);
  text->length += (size_t)length;
  return 0;
}

/* Appends a JSON string, or null. */
static inline int parity_dump_quote(parity_dump *dump, parity_dump_text *text, const char *value) {
  if (!value) return parity_dump_print(dump, text, "null");
  if (parity_dump_print(dump, text, "\"")) return -1;
  for (; *value; value++) {
    unsigned char c = (unsigned char)*value;
    const char *format = c == '"' || c == '\\' ? "\\%c" : c < 0x20 ? "\\u%04x" : "%c";
    if (parity_dump_print(dump, text, format, c)) return -1;
  }
  return parity_dump_print(dump, text, "\"");
}

/* Appends integers, comma-separated in brackets. */
static inline int parity_dump_list(parity_dump *dump, parity_dump_text *text, const int32_t *values, size_t count) {
  size_t i;
  for (i = 0; i < count; i++)
    if (parity_dump_print(dump, text, i ? ",%d" : "[%d", (int)values[i])) return -1;
  return parity_dump_print(dump, text, count ? "]" : "[]");
}

/* The name of a file in the folder, in a buffer of the caller. */
static inline int parity_dump_path(parity_dump *dump, char *path, size_t size, const char *format, int step) {
  int start = snprintf(path, size, "%s/", dump->folder.data);
  int end = start < 0 || (size_t)start >= size ? -1 : snprintf(path + start, size - (size_t)start, format, step);
  if (end < 0 || (size_t)(start + end) >= size) return parity_dump_fail(dump, "%s: the path is too long", dump->folder.data);
  return 0;
}

/* Gives a finished file its name. */
static inline int parity_dump_rename(parity_dump *dump, const char *from, const char *to) {
#ifdef _WIN32
  remove(to); /* rename() does not replace there */
#endif
  if (rename(from, to)) return parity_dump_fail(dump, "%s: cannot be renamed: %s", from, strerror(errno));
  return 0;
}

static inline int parity_dump_manifest(parity_dump *dump) {
  char part[1024], path[1024];
  parity_dump_text text = {NULL, 0, 0};
  FILE *file;
  size_t i, listed = 0;
  int bad;
  bad = parity_dump_print(dump, &text, "{\"schema\":\"parity-dump/1\",\"producer\":%s,\n\"tokens\":", dump->producer.data);
  bad = bad || parity_dump_list(dump, &text, dump->tokens, dump->tokens_count);
  bad = bad || parity_dump_print(dump, &text, ",\n\"steps\":[%s],\n\"rows\":{", dump->steps.data ? dump->steps.data : "");
  for (i = 0; i < dump->rows_count && !bad; i++) {
    if (!dump->rows[i].partial) continue;
    bad = parity_dump_print(dump, &text, listed++ ? ",\n\"%s\":" : "\n\"%s\":", dump->rows[i].name);
    bad = bad || parity_dump_list(dump, &text, dump->rows[i].positions, dump->rows[i].count);
  }
  bad = bad || parity_dump_print(dump, &text, "},\n\"complete\":%s}\n", dump->complete ? "true" : "false");
  bad = bad || parity_dump_path(dump, part, sizeof part, "manifest.json.part", 0);
  bad = bad || parity_dump_path(dump, path, sizeof path, "manifest.json", 0);
  if (!bad && !(file = fopen(part, "wb"))) bad = parity_dump_fail(dump, "%s: cannot be written: %s", part, strerror(errno));
  if (!bad) {
    int whole = fwrite(text.data, 1, text.length, file) == text.length;
    if (fclose(file) || !whole) bad = parity_dump_fail(dump, "%s: cannot be written: %s", part, strerror(errno));
  }
  free(text.data);
  return bad ? -1 : parity_dump_rename(dump, part, path);
}

/* Starts a dump in `folder`, which is made where it is missing (its parent is not); an earlier dump in it is replaced.
 *
 * `version` and `numerics` may be NULL. `numerics` says how the values are computed: the matmuls (`f32`, `f16`,
 * `bf16`), then `storage=` and `kv=` where values between nodes, or the cache, are narrower than f32, and `flash=on`:
 * "bf16 storage=bf16 kv=bf16". Returns NULL only where memory is out. */
static inline parity_dump *parity_dump_open(const char *folder, const char *producer, const char *version, const char *numerics) {
  parity_dump *dump = (parity_dump *)calloc(1, sizeof *dump);
  char path[1024];
  int step, bad;
  if (!dump) return NULL;
  bad = parity_dump_print(dump, &dump->folder, "%s", folder) || parity_dump_print(dump, &dump->producer, "{\"name\":");
  bad = bad || parity_dump_quote(dump, &dump->producer, producer && *producer ? producer : "c");
  bad = bad || parity_dump_print(dump, &dump->producer, ",\"version\":") || parity_dump_quote(dump, &dump->producer, version);
  bad = bad || parity_dump_print(dump, &dump->producer, ",\"numerics\":") || parity_dump_quote(dump, &dump->producer, numerics);
  if (bad || parity_dump_print(dump, &dump->producer, "}")) return dump;
  if (PARITY_DUMP_MKDIR(folder) && errno != EEXIST) {
    parity_dump_fail(dump, "%s: the folder cannot be made: %s", folder, strerror(errno));
    return dump;
  }
  if (parity_dump_manifest(dump)) return dump;
  for (step = 0; !parity_dump_path(dump, path, sizeof path, "step-%04d.safetensors", step) && !remove(path); step++) {}
  if (!parity_dump_path(dump, path, sizeof path, "seen.json", 0)) remove(path);
  return dump;
}

/* The first error, or NULL. */
static inline const char *parity_dump_error(const parity_dump *dump) {
  return dump && dump->error[0] ? dump->error : NULL;
}

static inline int parity_dump_copy(parity_dump *dump, int32_t **to, size_t *count, size_t *room, const int32_t *from, size_t n) {
  int32_t *grown = (int32_t *)parity_dump_grow(dump, *to, room, *count + n, sizeof **to);
  if (!grown) return -1;
  *to = grown;
  if (n) memcpy(grown + *count, from, n * sizeof *grown);
  *count += n;
  return 0;
}

/* Starts a forward pass over `count` tokens. `positions` may be NULL: they then follow the step before. */
static inline int parity_dump_begin_step(parity_dump *dump, const int32_t *tokens, const int32_t *positions, size_t count) {
  char path[1024];
  size_t i;
  if (!dump) return 0;
  if (dump->error[0]) return -1;
  if (dump->file) return parity_dump_fail(dump, "begin_step: the step before is not finished");
  if (!count) return parity_dump_fail(dump, "begin_step: a step has one token or more");
  dump->positions_count = dump->next_count = 0;
  for (i = 0; i < count; i++) {
    int32_t zero = 0, position = positions ? positions[i] : (int32_t)(dump->tokens_count);
    if (position < 0 || tokens[i] < 0) return parity_dump_fail(dump, "begin_step: token %d at position %d", (int)tokens[i], (int)position);
    while ((size_t)position >= dump->tokens_count)
      if (parity_dump_copy(dump, &dump->tokens, &dump->tokens_count, &dump->tokens_room, &zero, 1)) return -1;
    dump->tokens[position] = tokens[i];
    if (parity_dump_copy(dump, &dump->positions, &dump->positions_count, &dump->positions_room, &position, 1)) return -1;
  }
  dump->header.length = 0;
  dump->written = 0;
  if (parity_dump_path(dump, path, sizeof path, "step-%04d.safetensors.part", dump->step_count)) return -1;
  dump->file = fopen(path, "w+b");
  if (!dump->file || fseek(dump->file, (long)(8 + PARITY_DUMP_HEADER_BYTES), SEEK_SET))
    return parity_dump_fail(dump, "%s: cannot be written: %s", path, strerror(errno));
  return 0;
}

/* The next tensor has rows at these positions only, `count` of the step's: the logits of the last token, say. */
static inline int parity_dump_rows(parity_dump *dump, const int32_t *positions, size_t count) {
  if (!dump) return 0;
  if (dump->error[0]) return -1;
  dump->next_count = 0;
  return parity_dump_copy(dump, &dump->next, &dump->next_count, &dump->next_room, positions, count);
}

/* The entry of a tensor's positions, a new one where the name is new. */
static inline parity_dump_rows_of *parity_dump_entry(parity_dump *dump, const char *name) {
  size_t i;
  void *grown;
  for (i = 0; i < dump->rows_count; i++)
    if (!strcmp(dump->rows[i].name, name)) return dump->rows + i;
  if (!(grown = parity_dump_grow(dump, dump->rows, &dump->rows_room, dump->rows_count + 1, sizeof *dump->rows))) return NULL;
  dump->rows = (parity_dump_rows_of *)grown;
  memset(dump->rows + i, 0, sizeof *dump->rows);
  memcpy(dump->rows[i].name, name, strlen(name) + 1);
  dump->rows[i].step = -1;
  dump->rows_count++;
  return dump->rows + i;
}

/* Checks name and shape, and notes the tensor in the header and in `rows`. */
static inline int parity_dump_announce(parity_dump *dump, int layer, const char *name, parity_dump_type type, const int64_t *n) {
  static const char *const types[] = {"F32", "F16", "BF16"};
  char id[PARITY_DUMP_NAME_MAX];
  int length = layer < 0 ? snprintf(id, sizeof id, "%s", name) : snprintf(id, sizeof id, "blk.%d.%s", layer, name);
  int matrix = !strcmp(name, "attn_scores") || !strcmp(name, "attn_probs"), partial = dump->next_count != 0;
  size_t i, expected = partial ? dump->next_count : dump->positions_count;
  const int32_t *positions = partial ? dump->next : dump->positions;
  int64_t found = n[matrix], row[2];
  uint64_t bytes = (type == PARITY_F32 ? 4u : 2u) * (uint64_t)n[0] * (uint64_t)n[1] * (uint64_t)(n[2] ? n[2] : 1);
  parity_dump_rows_of *entry;
  row[0] = matrix ? n[0] : n[1];
  row[1] = matrix ? 0 : n[2];
  dump->next_count = 0;
  if (!dump->file) return parity_dump_fail(dump, "%s: no step is open: call parity_dump_begin_step first", name);
  if (length < 1 || (size_t)length >= sizeof id || strcspn(id, "\"\\/ \t\n") != (size_t)length || !strcmp(id, "tokens"))
    return parity_dump_fail(dump, "`%s` is no name for a tensor: one without blanks, quotes and slashes, such as q_rope", name);
  if (n[0] <= 0 || n[1] <= 0 || n[2] < 0 || (matrix && !n[2]) || (uint64_t)found != expected)
    return parity_dump_fail(dump, "%s: expected %llu rows on axis %d, one for each position; found shape (%lld, %lld, %lld)",
                            id, (unsigned long long)expected, matrix, (long long)n[0], (long long)n[1], (long long)n[2]);
  for (i = 0; i < expected; i++) {
    size_t at = 0;
    while (at < dump->positions_count && dump->positions[at] != positions[i]) at++;
    if (at == dump->positions_count) return parity_dump_fail(dump, "%s: %d is no position of the step", id, (int)positions[i]);
  }
  if (!(entry = parity_dump_entry(dump, id))) return -1;
  if (entry->step == dump->step_count) return parity_dump_fail(dump, "%s: a second time in one step", id);
  if (entry->step >= 0 && (entry->row[0] != row[0] || entry->row[1] != row[1]))
    return parity_dump_fail(dump, "%s: its rows change their shape from step to step", id);
  entry->step = dump->step_count;
  memcpy(entry->row, row, sizeof row);
  entry->partial |= partial && expected < dump->positions_count;
  if (parity_dump_copy(dump, &entry->positions, &entry->count, &entry->room, positions, expected)) return -1;
  if (parity_dump_print(dump, &dump->header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld,%lld", dump->header.length ? "," : "{", id,
                        types[type], (long long)n[0], (long long)n[1])) return -1;
  if (n[2] && parity_dump_print(dump, &dump->header, ",%lld", (long long)n[2])) return -1;
  return parity_dump_print(dump, &dump->header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)dump->written,
                           (unsigned long long)(dump->written + bytes));
}

/* Adds a tensor to the open step from any layout: element (i, j, k) of the dump lies at data[i*s0 + j*s1 + k*s2].
 *
 * A (H, T, E) buffer goes in as (T, H, E) by n0=T, n1=H, n2=E, s0=E, s1=T*E, s2=1; padded rows by a larger s0. */
static inline int parity_dump_strided(parity_dump *dump, int layer, const char *name, parity_dump_type type, const void *data,
                                      int64_t n0, int64_t n1, int64_t n2, int64_t s0, int64_t s1, int64_t s2) {
  const char *bytes = (const char *)data;
  int64_t shape[3], i, j, k, last = n2 ? n2 : 1;
  size_t size = type == PARITY_F32 ? 4 : 2;
  char *row;
  int whole = 1;
  if (!dump) return 0;
  if (dump->error[0]) return -1;
  shape[0] = n0, shape[1] = n1, shape[2] = n2;
  if (parity_dump_announce(dump, layer, name, type, shape)) return -1;
  if (!(row = (char *)malloc((size_t)(n1 * last) * size))) return parity_dump_fail(dump, "out of memory");
  for (i = 0; i < n0 && whole; i++) {
    for (j = 0; j < n1; j++)
      if (s2 == 1) memcpy(row + (size_t)(j * last) * size, bytes + (i * s0 + j * s1) * (int64_t)size, (size_t)last * size);
      else
        for (k = 0; k < last; k++)
          memcpy(row + (size_t)(j * last + k) * size, bytes + (i * s0 + j * s1 + k * s2) * (int64_t)size, size);
    whole = fwrite(row, size, (size_t)(n1 * last), dump->file) == (size_t)(n1 * last);
  }
  free(row);
  dump->written += (uint64_t)(n0 * n1 * last) * size;
  return whole ? 0 : parity_dump_fail(dump, "%s: cannot be written: %s", dump->folder.data, strerror(errno));
}

/* Adds a tensor to the open step: `layer` from 0, or -1 for embed, final_norm and logits; `name` as in docs/dumps.md
 * without the layer; slowest axis first, n2 = 0 where there are two axes. Token rows on the first axis, of attn_scores
 * and attn_probs on the second. */
static inline int parity_dump_tensor(parity_dump *dump, int layer, const char *name, parity_dump_type type, const void *data,
                                     int64_t n0, int64_t n1, int64_t n2) {
  return parity_dump_strided(dump, layer, name, type, data, n0, n1, n2, n1 * (n2 ? n2 : 1), n2 ? n2 : 1, 1);
}

/* Copies the tensors of a step behind a header of `reserve` bytes, into a second file. */
static inline FILE *parity_dump_make_room(parity_dump *dump, const char *path, uint64_t reserve) {
  char buffer[4096];
  uint64_t left = dump->written;
  FILE *file = fopen(path, "wb");
  int whole = file && !fseek(file, (long)(8 + reserve), SEEK_SET);
  whole = whole && !fseek(dump->file, (long)(8 + PARITY_DUMP_HEADER_BYTES), SEEK_SET);
  while (whole && left) {
    size_t piece = left < sizeof buffer ? (size_t)left : sizeof buffer;
    whole = fread(buffer, 1, piece, dump->file) == piece && fwrite(buffer, 1, piece, file) == piece;
    left -= piece;
  }
  fclose(dump->file);
  dump->file = NULL;
  if (whole) return file;
  parity_dump_fail(dump, "%s: cannot be written: %s", path, strerror(errno));
  if (file) fclose(file);
  return NULL;
}

/* Finishes the open step: its file gets its header and its name, and the manifest lists it. */
static inline int parity_dump_end_step(parity_dump *dump) {
  char part[1024], moved[1024], path[1024], name[32];
  uint64_t reserve = PARITY_DUMP_HEADER_BYTES, i;
  unsigned char size[8];
  int whole;
  if (!dump) return 0;
  if (dump->error[0]) return -1;
  if (!dump->file) return parity_dump_fail(dump, "end_step: no step is open");
  if (parity_dump_path(dump, part, sizeof part, "step-%04d.safetensors.part", dump->step_count)) return -1;
  if (parity_dump_path(dump, moved, sizeof moved, "step-%04d.safetensors.part2", dump->step_count)) return -1;
  if (parity_dump_path(dump, path, sizeof path, "step-%04d.safetensors", dump->step_count)) return -1;
  if (parity_dump_print(dump, &dump->header, dump->header.length ? "}" : "{}")) return -1;
  if (dump->header.length > reserve) {
    reserve = (dump->header.length + 7) & ~(uint64_t)7;
    if (!(dump->file = parity_dump_make_room(dump, moved, reserve))) return -1;
    remove(part);
    memcpy(part, moved, sizeof part);
  }
  for (i = 0; i < 8; i++) size[i] = (unsigned char)(reserve >> (8 * i));
  whole = !fseek(dump->file, 0, SEEK_SET) && fwrite(size, 1, 8, dump->file) == 8;
  whole = whole && fwrite(dump->header.data, 1, dump->header.length, dump->file) == dump->header.length;
  for (i = dump->header.length; i < reserve && whole; i++) whole = fputc(' ', dump->file) != EOF;
  whole = !fclose(dump->file) && whole;
  dump->file = NULL;
  if (!whole) return parity_dump_fail(dump, "%s: cannot be written: %s", part, strerror(errno));
  if (parity_dump_rename(dump, part, path)) return -1;
  snprintf(name, sizeof name, "step-%04d.safetensors", dump->step_count);
  if (parity_dump_print(dump, &dump->steps, "%s\n{\"file\":\"%s\",\"positions\":", dump->step_count ? "," : "", name)) return -1;
  if (parity_dump_list(dump, &dump->steps, dump->positions, dump->positions_count)) return -1;
  if (parity_dump_print(dump, &dump->steps, "}")) return -1;
  dump->step_count++;
  return parity_dump_manifest(dump);
}

/* Marks the dump complete and frees it. Returns 0, or -1 and says on stderr what went wrong first. */
static inline int parity_dump_close(parity_dump *dump) {
  size_t i;
  int bad;
  if (!dump) return 0;
  if (dump->file && !dump->error[0]) parity_dump_fail(dump, "close: the last step is not finished");
  if (dump->file) {
    char part[1024];
    fclose(dump->file);
    if (!parity_dump_path(dump, part, sizeof part, "step-%04d.safetensors.part", dump->step_count)) remove(part);
  }
  if (!dump->error[0]) {
    dump->complete = 1;
    parity_dump_manifest(dump);
  }
  bad = dump->error[0] ? -1 : 0;
  if (bad) fprintf(stderr, "parity_dump: %s\n", dump->error);
  for (i = 0; i < dump->rows_count; i++) free(dump->rows[i].positions);
  free(dump->rows), free(dump->tokens), free(dump->positions), free(dump->next);
  free(dump->folder.data), free(dump->producer.data), free(dump->steps.data), free(dump->header.data);
  free(dump);
  return bad;
}

#if defined(__CUDACC__) || defined(PARITY_DUMP_CUDA)
#include <cuda_runtime.h>

/* parity_dump_tensor() of device memory: waits for `stream`, copies, writes. */
static inline int parity_dump_device_tensor(parity_dump *dump, int layer, const char *name, parity_dump_type type, const void *device,
                                            int64_t n0, int64_t n1, int64_t n2, cudaStream_t stream) {
  size_t bytes = (type == PARITY_F32 ? 4u : 2u) * (size_t)(n0 * n1 * (n2 ? n2 : 1));
  cudaError_t status;
  void *host;
  int result;
  if (!dump) return 0;
  if (dump->error[0]) return -1;
  if (!(host = malloc(bytes ? bytes : 1))) return parity_dump_fail(dump, "out of memory");
  status = cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  result = status == cudaSuccess ? parity_dump_tensor(dump, layer, name, type, host, n0, n1, n2)
                                 : parity_dump_fail(dump, "%s: %s", name, cudaGetErrorString(status));
  free(host);
  return result;
}
#endif

#endif
