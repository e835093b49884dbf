#!/usr/bin/env python3
"""Writes a small random model of the architecture llama: random-model.py OUT HEAD HEADS KV_HEADS [WIDTH FFN LAYERS TYPE]

For recordings that are about shapes: heads of HEAD channels, HEADS of them over KV_HEADS of keys and values, a WIDTH of
256 and FFN of 512 channels, one layer, weights of TYPE F16 or F32. The data are normal, seeded by each tensor's name,
so that two machines write the same file. Needs numpy and gguf (PyPI).
"""
import sys
import zlib

import numpy as np
from gguf import GGUFWriter

if len(sys.argv) < 5 or sys.argv[1] in ("-h", "--help"):
    sys.exit(__doc__)
out, head, heads, kv = sys.argv[1], *map(int, sys.argv[2:5])
width, ffn, layers = (list(map(int, sys.argv[5:8])) + [256, 512, 1][len(sys.argv[5:8]):])
dtype = {"F16": np.float16, "F32": np.float32}[sys.argv[8] if len(sys.argv) > 8 else "F16"]
VOCABULARY = 320

writer = GGUFWriter(out, "llama")
writer.add_name(f"random-{head}-{heads}-{kv}")
writer.add_context_length(4096)
writer.add_embedding_length(width)
writer.add_block_count(layers)
writer.add_feed_forward_length(ffn)
writer.add_head_count(heads)
writer.add_head_count_kv(kv)
writer.add_key_length(head)
writer.add_value_length(head)
writer.add_rope_dimension_count(head)
writer.add_rope_freq_base(10000.0)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_vocab_size(VOCABULARY)
writer.add_tokenizer_model("no_vocab")


def tensor(name, shape, kind=dtype):
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 1, shape)
    values = 1 + 0.1 * values if len(shape) == 1 else values / np.sqrt(shape[-1])
    writer.add_tensor(name, values.astype(kind))


tensor("token_embd.weight", (VOCABULARY, width))
tensor("output_norm.weight", (width,), np.float32)
tensor("output.weight", (VOCABULARY, width))
for layer in range(layers):
    block = f"blk.{layer}."
    tensor(block + "attn_norm.weight", (width,), np.float32)
    tensor(block + "attn_q.weight", (heads * head, width))
    tensor(block + "attn_k.weight", (kv * head, width))
    tensor(block + "attn_v.weight", (kv * head, width))
    tensor(block + "attn_output.weight", (width, heads * head))
    tensor(block + "ffn_norm.weight", (width,), np.float32)
    tensor(block + "ffn_gate.weight", (ffn, width))
    tensor(block + "ffn_up.weight", (ffn, width))
    tensor(block + "ffn_down.weight", (width, ffn))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
