#!/usr/bin/env python3
"""Writes tiny random models that are no decoders: encoders.py OUT

bert.gguf and nomic-bert.gguf encode alone, the second with RoPE; t5.gguf has an encoder and a decoder that reads it; tower.gguf
encodes images of 32 x 32 pixels for a model of 256 columns, as tower.c and llama.cpp's own mtmd do.
Values are normal, standard deviation 0.1, seeded by each tensor's name. Needs numpy and gguf (PyPI).
"""
import sys, zlib
from pathlib import Path
import numpy as np
import gguf

V, D, F, H, LAYERS, CONTEXT = 128, 64, 96, 4, 2, 64


def write(out, name, tensors, rest, arch=None):
    file = gguf.GGUFWriter(out / f"{name}.gguf", arch or name)
    file.add_context_length(CONTEXT), file.add_embedding_length(D), file.add_block_count(LAYERS)
    file.add_feed_forward_length(F), file.add_head_count(H), file.add_vocab_size(V), file.add_tokenizer_model("none")
    rest(file)
    for tensor, shape in tensors.items():
        values = np.random.default_rng(zlib.crc32(tensor.encode())).normal(0, 0.1, shape)
        file.add_tensor(tensor, (values + (any(of in tensor for of in ("norm", ".ln", "_ln")) and tensor.endswith("weight"))).astype(np.float32))
    file.write_header_to_file(), file.write_kv_data_to_file(), file.write_tensors_to_file(), file.close()


def bert(positions):
    tensors = {"token_embd.weight": (V, D), "token_types.weight": (2, D)}
    tensors |= {"position_embd.weight": (CONTEXT, D)} if positions else {}
    matrices = {"attn_output": (D, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    matrices |= {f"attn_{of}": (D, D) for of in "qkv"} if positions else {"attn_qkv": (3 * D, D), "ffn_gate": (F, D)}
    norms = ["token_embd_norm"] + [f"blk.{n}.{of}_output_norm" for n in range(LAYERS) for of in ("attn", "layer")]
    for n in range(LAYERS):
        tensors |= {f"blk.{n}.{of}.weight": shape for of, shape in matrices.items()}
        tensors |= {f"blk.{n}.{of}.bias": shape[:1] for of, shape in matrices.items() if positions}
    return tensors | {f"{norm}.{of}": (D,) for norm in norms for of in ("weight", "bias")}


def t5():
    tensors = {"token_embd.weight": (V, D), "output.weight": (V, D)}
    attention = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D)}
    tensors |= {f"{side}.output_norm.weight": (D,) for side in ("enc", "dec")}
    tensors |= {f"{side}.blk.0.attn_rel_b.weight": (8, H) for side in ("enc", "dec")}
    for at in [f"{side}.blk.{n}." for side in ("enc", "dec") for n in range(LAYERS)]:
        for part in ["attn"] + ["cross_attn"] * at.startswith("dec"):
            tensors |= {f"{at}{part}_{of}.weight": shape for of, shape in attention.items()}
            tensors[f"{at}{part}_norm.weight"] = (D,)
        tensors |= {f"{at}ffn_norm.weight": (D,), f"{at}ffn_up.weight": (F, D), f"{at}ffn_down.weight": (D, F)}
        tensors |= {f"{at}ffn_gate.weight": (F, D)}
    return tensors


def tower():
    tensors = {"v.patch_embd.weight": (D, 3, 8, 8), "v.patch_embd.bias": (D,), "v.position_embd.weight": (16, D)}
    matrices = {f"attn_{of}": (D, D) for of in ("q", "k", "v", "out")} | {"ffn_up": (F, D), "ffn_down": (D, F)}
    for n in range(LAYERS):
        tensors |= {f"v.blk.{n}.{of}.weight": shape for of, shape in matrices.items()}
        tensors |= {f"v.blk.{n}.{of}.bias": shape[:1] for of, shape in matrices.items()}
    norms = ["v.post_ln"] + [f"v.blk.{n}.{of}" for n in range(LAYERS) for of in ("ln1", "ln2")]
    tensors |= {f"{norm}.{of}": (D,) for norm in norms for of in ("weight", "bias")}
    return tensors | {"mm.0.weight": (F, D), "mm.0.bias": (F,), "mm.2.weight": (256, F), "mm.2.bias": (256,)}


def of_tower(file):
    file.add_bool("clip.has_vision_encoder", True), file.add_string("clip.projector_type", "mlp"), file.add_bool("clip.use_gelu", True)
    numbers = {"embedding_length": D, "feed_forward_length": F, "block_count": LAYERS, "projection_dim": 256, "image_size": 32}
    for name, value in (numbers | {"patch_size": 8, "attention.head_count": H}).items():
        file.add_uint32(f"clip.vision.{name}", value)
    file.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    file.add_array("clip.vision.image_mean", [0.5] * 3), file.add_array("clip.vision.image_std", [0.5] * 3)


def of_bert(file):
    file.add_layer_norm_eps(1e-12), file.add_causal_attention(False), file.add_token_type_count(2)
    file.add_pooling_type(gguf.PoolingType.MEAN), file.add_rope_freq_base(1000.0)


def of_t5(file):
    file.add_layer_norm_rms_eps(1e-6), file.add_relative_attn_buckets_count(8), file.add_decoder_start_token_id(0)
    file.add_key_length(D // H), file.add_value_length(D // H)


out = Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
write(out, "bert", bert(True), of_bert)
write(out, "nomic-bert", bert(False), of_bert)
write(out, "t5", t5(), of_t5)
write(out, "tower", tower(), of_tower, "clip")
