#!/usr/bin/env python3
"""Healthy transformers models of other families, captured as they are and judged without any flag.

    python/tests/families.py [--keep FOLDER] [FAMILY…]

A small random model of each family (Qwen3-MoE, Gemma 3, gpt-oss, Llama) is written as a GGUF file as llama.cpp's converter
lays it out, captured in f32, bf16 and f16 as a prefill with decode steps, and audited on the graph that parity builds
of the file; and in one pass as hooks see it, under the names of its modules. Needs torch, transformers, gguf, safetensors
and a built parity (PARITY names the binary). Exit code 0: all captures are at parity, and nothing is accused; 1 otherwise.
"""

import argparse
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]

import gguf  # noqa: E402
import healthy  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

TOKENS = [3, 17, 91, 42, 8, 64, 5, 33, 77, 9, 55, 13]
PROMPT = 8
# Ends of names in transformers -> GGUF.
COMMON = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OSS = {"post_attention_layernorm": "post_attention_norm"}
GLOBALS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}  # fmt: skip


def qwen3moe():
    model = models.random("Qwen3Moe", hidden_size=96, moe_intermediate_size=32)
    return model, "qwen3moe", {**COMMON}


def gemma3():
    model = models.random("Gemma3Text", hidden_size=96, sliding_window=4, query_pre_attn_scalar=16,
                          num_hidden_layers=7, use_bidirectional_attention=False)  # fmt: skip
    return model, "gemma3", {**COMMON, **GEMMA}


def gptoss():
    # llama.cpp takes whole columns as the limits of YaRN; the published configuration does not (`truncate: false`).
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # fmt: skip
    model = models.random("GptOss", hidden_size=96, intermediate_size=32, sliding_window=4, rope_parameters=rope,
                          max_position_embeddings=131072)  # fmt: skip
    return model, "gpt-oss", {**COMMON, **OSS}


def llama():
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return models.random("Llama", hidden_size=96, rope_parameters=rope), "llama", {**COMMON}


FAMILIES = {"qwen3moe": qwen3moe, "gemma3": gemma3, "gpt-oss": gptoss, "llama": llama}


def tensors(model, architecture, places):
    """Name and array of each tensor as a GGUF file has them."""
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        if name in GLOBALS:
            if architecture == "gemma3" and name == "model.norm.weight":
                array = array + 1
            if not (name == "lm_head.weight" and model.config.tie_word_embeddings):
                yield GLOBALS[name], array
            continue
        _, _, layer, rest = name.split(".", 3)
        block = f"blk.{layer}."
        if rest == "self_attn.sinks":
            yield block + "attn_sinks.weight", array
        elif rest == "mlp.experts.gate_up_proj" and architecture == "gpt-oss":
            yield block + "ffn_gate_exps.weight", array[:, :, 0::2].transpose(0, 2, 1)
            yield block + "ffn_up_exps.weight", array[:, :, 1::2].transpose(0, 2, 1)
        elif rest == "mlp.experts.gate_up_proj_bias":
            yield block + "ffn_gate_exps.bias", array[:, 0::2]
            yield block + "ffn_up_exps.bias", array[:, 1::2]
        elif rest == "mlp.experts.gate_up_proj":
            half = array.shape[1] // 2
            yield block + "ffn_gate_exps.weight", array[:, :half]
            yield block + "ffn_up_exps.weight", array[:, half:]
        elif rest == "mlp.experts.down_proj":
            turned = array.transpose(0, 2, 1) if architecture == "gpt-oss" else array
            yield block + "ffn_down_exps.weight", turned
        elif rest == "mlp.experts.down_proj_bias":
            yield block + "ffn_down_exps.bias", array
        else:
            stem, kind = rest.rsplit(".", 1)
            if architecture == "gemma3" and stem.endswith("norm"):
                array = array + 1
            if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                array = pairs(array, model.config.head_dim)
            yield f"{block}{places[stem]}.{kind}", array


def pairs(array, width):
    """Rows of heads (2, E/2) as (E/2, 2): what lies half a head apart side by side, for llama.cpp's RoPE."""
    return array.reshape(-1, 2, width // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write(model, architecture, places, path, spoil=lambda name, array: array):
    """The model as a GGUF file; `spoil` makes mistakes in its tensors."""
    config = model.config
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    out.add_rope_freq_base(full["rope_theta"])
    if architecture == "qwen3moe":
        out.add_expert_count(config.num_experts)
        out.add_expert_used_count(config.num_experts_per_tok)
        out.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "gpt-oss":
        out.add_expert_count(config.num_local_experts)
        out.add_expert_used_count(config.num_experts_per_tok)
        out.add_expert_feed_forward_length(config.intermediate_size)
        out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        out.add_rope_scaling_factor(full["factor"])
        out.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if architecture in ("gemma3", "gpt-oss"):
        out.add_sliding_window(config.sliding_window)
    if architecture == "gemma3":
        out.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    # llama.cpp loads a model without a tokenizer only where the file says so.
    out.add_tokenizer_model("no_vocab")
    out.add_vocab_size(config.vocab_size)
    out.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, array in tensors(model, architecture, places):
        out.add_tensor(name, np.ascontiguousarray(spoil(name, array), dtype=np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def hooked(model):
    """What forward hooks on all modules that compute one tensor see, by the modules' names."""
    found = {}

    def hook(name):
        def keep(module, inputs, output):
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                found[name] = output.detach().float().numpy()

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits
    for handle in handles:
        handle.remove()
    found["lm_head"] = logits.float().numpy()
    return found


def judged_by_names(model, path, file):
    """What `audit` says of the outputs of modules under their own names: healthy, or what it could not judge."""
    arrays = {name: np.ascontiguousarray(array) for name, array in hooked(model).items()}
    save_file(arrays | {"tokens": np.array(TOKENS, np.int32)}, file)
    good, said = healthy.judge(["audit", file, "-m", path, "--allow-missing"])
    return good or said.startswith("exit 2"), said


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="qwen3moe, gemma3, gpt-oss, llama; all where none is named")
    parser.add_argument("--keep", type=pathlib.Path, help="where the files stay")
    given = parser.parse_args()
    all_good = True
    print("| family | loaded as | audit | by names of modules |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or pathlib.Path(scratch)
        for family in given.families or FAMILIES:
            for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
                model, architecture, places = FAMILIES[family]()
                path = folder / f"{family}.gguf"
                write(model, architecture, places, path)
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(dtype)
                dump = folder / f"{family}-{name}"
                healthy.capture(model, None, TOKENS, PROMPT, dump)
                good, said = healthy.judge(["audit", dump, "-m", path])
                named, also = judged_by_names(model, path, folder / f"{family}-{name}.safetensors")
                all_good &= good and named
                print(f"| {family} | {name} | {said} | {also} |", flush=True)
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
