#!/usr/bin/env python3
"""Ports a small model as docs/porting.md says, rightly and with one mistake at a time, and shows what is named and when.

    scripts/check-port.py LLAMA_CPP (--program LLAMA_COMPLETION | --libraries FOLDER) [--report FILE]

A random Llama of three layers is saved by transformers, converted by LLAMA_CPP/convert_hf_to_gguf.py, in which one line is
wrong, and compared by `parity port`. With --libraries a stand-in for llama-completion runs llama.cpp's shared libraries
(those of the npm package @node-llama-cpp/linux-x64). An adapter is ported too, rightly and with its alpha wrong. The right
ones must be PARITY, of the others the first finding must have the mistake's name. Exits non-zero where one has not.

    PARITY   the parity to test (default: target/release/parity)
    PYTHON   one with torch, transformers, peft, gguf and parity_dump (default: this one)
"""
import argparse, json, os, shutil, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARITY = os.environ.get("PARITY", str(ROOT / "target/release/parity"))
PYTHON = os.environ.get("PYTHON", sys.executable)
PROMPT = "def read_lines(path):"

options = argparse.ArgumentParser(usage=__doc__)
options.add_argument("llama", type=Path)
options.add_argument("--program")
options.add_argument("--libraries", type=Path)
options.add_argument("--report", type=Path)
options = options.parse_args()
if not (options.program or options.libraries):
    sys.exit(__doc__)

MAKE = r"""
import json, sys
import torch, transformers
from peft import LoraConfig, get_peft_model
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rope_theta=500000.0,
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=3997)
model = transformers.LlamaForCausalLM(config)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parameter.add_(0.1 * torch.randn_like(parameter)) if "norm" in name else parameter.mul_(3)
model.save_pretrained("hf")
# The tokenizer of the shipped model, as Hugging Face has it.
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
fields = GGUFReader(sys.argv[1]).fields
strings = lambda key: [bytes(fields[key].parts[at]).decode() for at in fields[key].data]
kinds = [int(fields["tokenizer.ggml.token_type"].parts[at][0]) for at in fields["tokenizer.ggml.token_type"].data]
tokens = strings("tokenizer.ggml.tokens")
plain = {token: at for at, (token, kind) in enumerate(zip(tokens, kinds)) if kind == 1}
merges = [tuple(merge.split(" ")) for merge in strings("tokenizer.ggml.merges")]
tokenizer = Tokenizer(models.BPE(vocab=plain, merges=merges))
words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
split = pre_tokenizers.Split(Regex(words), "isolated")
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind == 3])
tokenizer.save("hf/tokenizer.json")
json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 512},
    open("hf/tokenizer_config.json", "w"))
adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
with torch.no_grad():
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
adapted.save_pretrained("adapter")
"""

# Takes the flags of llama-completion that `parity port` gives.
STAND_IN = """#!/bin/bash
preload=$LD_PRELOAD; unset LD_PRELOAD
while [ $# -gt 0 ]; do
    case $1 in -m) model=$2; shift ;; -p) prompt=$2; shift ;; --lora | --lora-scaled) export DRIVER_LORA=$2; shift ;; esac
    shift
done
ids=$("%s" inspect "$model" -p "$prompt" --format json | python3 -c "import json, sys; print(*json.load(sys.stdin)['tokens'])")
export LD_PRELOAD=$preload
exec "%s" "%s" "$model" "$(wc -w <<<"$ids")" $ids
"""

# What is wrong, what names it, the converter's file, and the change in it.
MISTAKES = [
    ("nothing", None, "llama.py", None, None),
    ("rows of k stay in Hugging Face's order", "linear.qk_permuted", "llama.py", "data_torch = LlamaModel.permute(data_torch, n_head, n_kv_head)", "pass"),
    ("no RoPE base is written", "config.rope_theta", "base.py", "self.gguf_writer.add_rope_freq_base(rope_theta)", "pass"),
    ("another epsilon", "config.rms_norm_eps", "base.py", "self.gguf_writer.add_layer_norm_rms_eps(f_rms_eps)", "self.gguf_writer.add_layer_norm_rms_eps(1e-5)"),
    ("the head is left out", "config.tie_word_embeddings", "llama.py", "if self.undo_permute:", "if name == 'lm_head.weight': return\n        if self.undo_permute:"),
    ("one matrix is scaled by 1.01", "weights.differ", "llama.py", "if self.undo_permute:", "if 'layers.1.self_attn.o_proj' in name: data_torch = data_torch * 1.01\n        if self.undo_permute:"),
    ("rows of one matrix are moved by one", "weights.differ", "llama.py", "if self.undo_permute:", "if 'layers.2.mlp.down_proj' in name: data_torch = data_torch.roll(1, 0)\n        if self.undo_permute:"),
    ("another pre-tokenizer", "tokens.pre_tokenizer", "base.py", 'return "qwen2"', 'return "gpt-2"'),
]  # fmt: skip


def call(*command, cwd):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=cwd)


def must(*command, cwd):
    done = call(*command, cwd=cwd)
    if done.returncode:
        sys.exit(f"{Path(command[0]).name} {str(command[1])[:60]}: {done.stderr[-900:]}")


def converter(work, name, file, old, new):
    """llama.cpp's converter with one change; an unknown pre-tokenizer is taken for qwen2's, whose expression the model has."""
    to = work / f"convert-{name}"
    for part in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        to.mkdir(exist_ok=True)
        shutil.copy(options.llama / part, to)
    for part in ("conversion", "gguf-py"):
        shutil.copytree(options.llama / part, to / part, dirs_exist_ok=True)
    base = to / "conversion/base.py"
    unknown = 'raise NotImplementedError("BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")'
    base.write_text(base.read_text().replace(unknown, 'return "qwen2"'))
    if old:
        path = to / "conversion" / file
        text = path.read_text()
        if old not in text:
            sys.exit(f"{path}: has no line {old!r}: this script knows llama.cpp 0.5.0")
        path.write_text(text.replace(old, new))
    return to


def port(work, model, out, *more):
    begun = time.time()
    command = [PARITY, "port", "--original", "hf", "--converted", model, "-p", PROMPT, "--program", program, "--python", PYTHON]
    done = call(*command, "-o", out, *more, "--format", "json", cwd=work)
    taken = time.time() - begun
    if not done.stdout:
        return "error", done.stderr.strip()[-300:], [], taken
    report = json.loads(done.stdout)
    return report["verdict"], report["reason"] or "", [found["name"] for found in report.get("findings", [])], taken


lines, bad = [], 0


def say(what, wanted, found):
    global bad
    verdict, reason, names, taken = found
    good = verdict == "parity" if wanted is None else verdict == "divergence" and names[:1] == [wanted]
    bad += not good
    lines.append(f"{what:40} {verdict:10} {(names[:1] or ['-'])[0] if wanted else '-':28} {taken:6.1f} s{'' if good else '  NOT AS WANTED: ' + reason}")
    print(lines[-1], flush=True)


with tempfile.TemporaryDirectory() as work:
    work = Path(work)
    must(PYTHON, "-c", MAKE, ROOT / "reference-dumps/models/qwen2-tiny-py-F16.gguf", cwd=work)
    program = options.program
    if not program:
        program = work / "llama-completion"
        must("cc", "-O1", "-o", work / "driver", ROOT / "scripts/record/driver.c", "-ldl", cwd=ROOT)
        program.write_text(STAND_IN % (Path(PARITY).resolve(), work / "driver", options.libraries.resolve()))
        program.chmod(0o755)
    for number, (what, wanted, file, old, new) in enumerate(MISTAKES):
        to = converter(work, number, file, old, new)
        must(PYTHON, to / "convert_hf_to_gguf.py", "hf", "--outtype", "f32", "--outfile", f"{number}.gguf", cwd=work)
        say(what, wanted, port(work, f"{number}.gguf", f"port-{number}"))
    right = converter(work, 0, "llama.py", None, None)
    adapter = [PYTHON, right / "convert_lora_to_gguf.py", "adapter", "--base", "hf", "--outtype", "f32", "--outfile"]
    must(*adapter, "adapter.gguf", cwd=work)
    say("an adapter", None, port(work, "0.gguf", "port-lora", "--lora", "adapter.gguf", "--original-lora", "adapter"))
    config = work / "adapter/adapter_config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "lora_alpha": told["lora_alpha"] * 4}))
    must(*adapter, "alpha.gguf", cwd=work)
    config.write_text(json.dumps(told))
    say("alpha for alpha / rank", "lora.alpha", port(work, "0.gguf", "port-alpha", "--lora", "alpha.gguf", "--original-lora", "adapter"))

print(f"{bad} not as wanted" if bad else "all as wanted")
if options.report:
    commit = call("git", "rev-parse", "--short", "HEAD", cwd=ROOT).stdout.strip()
    head = [f"A small Llama, ported as docs/porting.md says: scripts/check-port.py at {commit}.", "What is wrong, the answer, its first finding, and the time until it.", ""]
    options.report.write_text("\n".join(head + lines) + "\n")
sys.exit(bool(bad))
