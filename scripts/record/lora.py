#!/usr/bin/env python3
"""Writes a random adapter for a model: lora.py MODEL OUT RANK ALPHA [PART…]

For each matrix of the model whose name holds one of the PARTs (default: attn_q attn_v ffn_down) in a layer: A of the
standard deviation 1/sqrt(columns) and B of 0.1, seeded by the matrix's name. OUT is a GGUF file as llama.cpp's
convert_lora_to_gguf.py writes it, or, where it has no suffix, a folder as PEFT saves it (safetensors and
adapter_config.json; of matrices that one module has alone). Needs numpy, gguf and, for folders, safetensors (PyPI).
"""
import json
import sys
import zlib
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

if len(sys.argv) < 5:
    sys.exit(__doc__)
model, out, rank, alpha = GGUFReader(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
parts = sys.argv[5:] or ["attn_q", "attn_v", "ffn_down"]
text = lambda key: bytes(model.fields[key].parts[-1]).decode()
number = lambda key, other: int(model.fields[key].parts[-1][0]) if key in model.fields else other
architecture = text("general.architecture")
MODULES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
           "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
           "ffn_down": "mlp.down_proj"}

pairs = {}
for tensor in model.tensors:
    name = tensor.name
    if not (name.startswith("blk.") and name.endswith(".weight") and any(name.split(".")[2] == part for part in parts)):
        continue
    *experts, rows, columns = [int(extent) for extent in tensor.shape[::-1]]
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    a = draw.normal(0, columns**-0.5, (*experts, rank, columns)).astype(np.float32)
    pairs[name] = a, draw.normal(0, 0.1, (*experts, rows, rank)).astype(np.float32)
if not pairs:
    sys.exit(f"{sys.argv[1]} has no matrix of {parts}")

if out.suffix == ".gguf":
    writer = GGUFWriter(out, architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in pairs.items():
        writer.add_tensor(name + ".lora_a", a)
        writer.add_tensor(name + ".lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
else:
    from safetensors.numpy import save_file

    heads = number(f"{architecture}.attention.head_count", 1)
    width = number(f"{architecture}.attention.key_length", number(f"{architecture}.embedding_length", 0) // heads)
    tensors = {}
    for name, (a, b) in pairs.items():
        _, layer, part, _ = name.split(".")
        if architecture == "llama" and part in ("attn_q", "attn_k"):
            # Hugging Face has the halves of a head one behind the other, the file has pairs.
            b = b.reshape(-1, width // 2, 2, rank).swapaxes(1, 2).reshape(b.shape)
        module = f"base_model.model.model.layers.{layer}.{MODULES[part]}"
        tensors[module + ".lora_A.weight"] = a
        tensors[module + ".lora_B.weight"] = np.ascontiguousarray(b)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(out / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": False, "use_dora": False}
    (out / "adapter_config.json").write_text(json.dumps(config))
