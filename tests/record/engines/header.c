/* Uses every function of include/parity_dump.h as an engine would: `header SCENARIO FOLDER`. C99 and C++11.
 *
 * Exits with what parity_dump_close() returns, 0 or 1 for an error. tests/record/engines.rs reads the dumps back. */
#include "parity_dump.h"

static float values[4096];

/* A dump of two steps: positions 0 to 2, then 3. Element i of a tensor is its offset plus i. */
static void two_steps(parity_dump *dump) {
  const int32_t prefill[3] = {312, 863, 2039}, decode[1] = {7}, last[1] = {2};
  const uint16_t halves[6] = {0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600}; /* 1 2 3 4 5 6 in f16 */
  const uint16_t brains[6] = {0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0}; /* 1 2 3 4 5 6 in bf16 */
  parity_dump_begin_step(dump, prefill, NULL, 3);
  parity_dump_tensor(dump, -1, "embed", PARITY_F32, values, 3, 4, 0);
  parity_dump_tensor(dump, 0, "ffn_norm", PARITY_F16, halves, 3, 2, 0);
  parity_dump_tensor(dump, 11, "ffn_norm", PARITY_BF16, brains, 3, 2, 0);
  /* q of (T, H, E) = (3, 2, 4), from a buffer of (H, T, E) */
  parity_dump_strided(dump, 0, "q_rope", PARITY_F32, values, 3, 2, 4, 4, 12, 1);
  /* rows of 4 in a buffer of rows of 10 */
  parity_dump_strided(dump, 0, "attn_out", PARITY_F32, values, 3, 4, 0, 10, 1, 1);
  /* (T, D) = (3, 4) from its transpose */
  parity_dump_strided(dump, 0, "ffn_out", PARITY_F32, values, 3, 4, 0, 1, 3, 1);
  parity_dump_tensor(dump, 0, "attn_probs", PARITY_F32, values, 2, 3, 3);
  parity_dump_rows(dump, last, 1);
  parity_dump_tensor(dump, -1, "logits", PARITY_F32, values + 100, 1, 5, 0);
  parity_dump_end_step(dump);
  parity_dump_begin_step(dump, decode, NULL, 1);
  parity_dump_tensor(dump, -1, "embed", PARITY_F32, values + 12, 1, 4, 0);
  parity_dump_tensor(dump, -1, "logits", PARITY_F32, values + 105, 1, 5, 0);
#ifdef PARITY_DUMP_CUDA
  parity_dump_device_tensor(dump, 0, "attn_norm", PARITY_F32, values + 7, 1, 4, 0, (cudaStream_t)0);
#endif
  parity_dump_end_step(dump);
}

/* More tensors in a step than its header was given room for, then few. */
static void many(parity_dump *dump) {
  int32_t token = 1;
  int layer;
  parity_dump_begin_step(dump, &token, NULL, 1);
  for (layer = 0; layer < 4000; layer++) parity_dump_tensor(dump, layer, "ffn_out", PARITY_F32, values + layer, 1, 3, 0);
  parity_dump_end_step(dump);
  parity_dump_begin_step(dump, &token, NULL, 1);
  parity_dump_tensor(dump, 5, "ffn_out", PARITY_F32, values, 1, 3, 0);
  parity_dump_end_step(dump);
}

/* One mistake each. */
static void mistake(parity_dump *dump, const char *which) {
  const int32_t tokens[2] = {1, 2}, elsewhere[1] = {9};
  if (!strcmp(which, "no-step")) parity_dump_tensor(dump, 0, "q", PARITY_F32, values, 2, 2, 4);
  if (!strcmp(which, "no-end")) parity_dump_end_step(dump);
  parity_dump_begin_step(dump, tokens, NULL, !strcmp(which, "no-token") ? 0 : 2);
  if (!strcmp(which, "twice-begun")) parity_dump_begin_step(dump, tokens, NULL, 2);
  if (!strcmp(which, "shape")) parity_dump_tensor(dump, 0, "q", PARITY_F32, values, 3, 2, 4);
  if (!strcmp(which, "empty")) parity_dump_tensor(dump, 0, "q", PARITY_F32, values, 2, 0, 4);
  if (!strcmp(which, "name")) parity_dump_tensor(dump, 0, "q rope", PARITY_F32, values, 2, 2, 4);
  parity_dump_tensor(dump, 0, "q", PARITY_F32, values, 2, 2, 4);
  if (!strcmp(which, "twice")) parity_dump_tensor(dump, 0, "q", PARITY_F32, values, 2, 2, 4);
  if (!strcmp(which, "rows")) {
    parity_dump_rows(dump, elsewhere, 1);
    parity_dump_tensor(dump, -1, "logits", PARITY_F32, values, 1, 5, 0);
  }
#ifdef PARITY_DUMP_CUDA
  if (!strcmp(which, "device")) parity_dump_device_tensor(dump, 0, "v", PARITY_F32, NULL, 2, 2, 4, (cudaStream_t)0);
#endif
  if (!strcmp(which, "unfinished")) return;
  parity_dump_end_step(dump);
  parity_dump_begin_step(dump, tokens, NULL, 1);
  if (!strcmp(which, "changes")) parity_dump_tensor(dump, 0, "q", PARITY_F32, values, 1, 4, 2);
  parity_dump_end_step(dump);
}

int main(int count, char **arguments) {
  parity_dump *dump;
  int i;
  if (count != 3) return 2;
  for (i = 0; i < 4096; i++) values[i] = (float)i;
  dump = parity_dump_open(arguments[2], "header \"test\"", "1.2", "f32");
  if (!strcmp(arguments[1], "two-steps")) two_steps(dump);
  else if (!strcmp(arguments[1], "many")) many(dump);
  else mistake(dump, arguments[1]);
  two_steps(NULL); /* nothing, for an engine that was not asked to dump */
  return parity_dump_close(dump) ? 1 : 0;
}
