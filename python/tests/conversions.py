#!/usr/bin/env python3
"""Conversions of small transformers models to GGUF, right ones and wrong ones, told from weights and from tensors.

    python/tests/conversions.py [--keep FOLDER] [--libraries FOLDER]

Each model is saved as Hugging Face lays it out, converted, captured, and judged twice: `parity inspect MODEL --against
FOLDER` compares the weights, `parity audit` the captured tensors. Rows of queries and keys of the Llama family are
captured both in the file's order and in Hugging Face's. With --libraries, llama.cpp runs each file under `parity record`
as well, and `parity diff RECORDING CAPTURE -m MODEL` has to say the same. Needs torch, transformers, gguf and a built
parity (PARITY names the binary); --libraries, llama.cpp's shared libraries (those of the npm package
@node-llama-cpp/linux-x64) and a C compiler. Exit code 0: right ones are silent, wrong ones are named; 1 otherwise.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]

import families  # noqa: E402
import healthy  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.llama import modeling_llama as llama_code  # noqa: E402

import parity_dump  # noqa: E402


def halves(array, width):
    """The reverse of `families.pairs`."""
    return array.reshape(-1, width // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def not_permuted(name, array):
    return halves(array, 16) if name.endswith(("attn_q.weight", "attn_k.weight")) else array


def one_norm_without_one(name, array):
    norm = one_norm_without_one.model.model.layers[1].pre_feedforward_layernorm
    return norm.weight.detach().numpy() if name == "blk.1.ffn_norm.weight" else array


def two_experts_exchanged(name, array):
    return array[[1, 0, *range(2, len(array))]] if name == "blk.1.ffn_up_exps.weight" else array


def another_layer(name, array, held={}):
    held[name] = array
    return held["blk.0.attn_output.weight"] if name == "blk.1.attn_output.weight" else array



transformers.utils.logging.disable_progress_bar()

# Family, what is spoilt, where `inspect` says it and how, where an audit of the tensors says it and how (a weight that is
# not in the file any more has no name); the order in
# which rows of queries and keys are captured.
WRONG = [
    ("llama", not_permuted, ("blk.0.attn_q.weight", "linear.qk_permuted"), ("blk.0.q_rope", "rope.interleaved"), "hf"),
    ("gemma3", one_norm_without_one, ("blk.1.ffn_norm.weight", "norm.unit_offset"), ("blk.1.ffn_norm", "norm.unit_offset"), None),
    ("qwen3moe", two_experts_exchanged, ("blk.1.ffn_up_exps.weight", "moe.expert_index"), ("blk.1.ffn_moe_out", "moe.expert_index"), None),
    ("llama", another_layer, ("blk.1.attn_output.weight", "linear.wrong_layer"), ("blk.1.attn_out", None), None),
]  # fmt: skip


def made(family):
    """A model of a family whose norms are no ones and zeros."""
    model, architecture, places = families.FAMILIES[family]()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model, architecture, places


def capture(model, folder, order=None):
    options = {"qk_order": order} if order else {}
    with torch.no_grad(), parity_dump.capture(model, folder, **options):
        cache, tokens = None, families.TOKENS
        for ids in (tokens[: families.PROMPT], *[[token] for token in tokens[families.PROMPT :]]):
            cache = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values


def run(*arguments):
    command = [healthy.BINARY, *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr.strip()


def of_weights(path, folder):
    """Exit code, and tensor and name of the first mistake."""
    code, found, error = run("inspect", path, "--against", folder)
    wrong = [(pair["name"], one["fault"]) for pair in found.get("tensors", []) for one in pair["mistakes"]]
    return code, (wrong or [(error, None)])[0]


def of_tensors(path, dump):
    """Exit code, place and name of the first mistake, and the notes."""
    code, found, error = run("audit", dump, "-m", path)
    first = found.get("first_divergence") or {"checkpoint": error or found.get("reason"), "diagnosis": []}
    named = first["diagnosis"][0]["fault"] if first["diagnosis"] else None
    return code, (first["checkpoint"], named), found.get("notes", [])


class Recorder:
    """llama.cpp under `parity record`; says nothing where its libraries were not given."""

    def __init__(self, libraries, scratch):
        self.libraries, self.driver = libraries, scratch / "driver"
        if libraries:
            source = ROOT / "scripts" / "record" / "driver.c"
            subprocess.run(["cc", "-O1", "-o", self.driver, source, "-ldl"], check=True)

    def said(self, path, dump):
        """Exit code, place and name of the first mistake of a diff of llama.cpp's recording with the captured tensors."""
        if not self.libraries:
            return None
        recording = path.with_suffix(".recording")
        words = [str(token) for token in families.TOKENS]
        command = [healthy.BINARY, "record", "-o", recording, "--force", "--", self.driver, self.libraries, path]
        done = subprocess.run([*command, str(families.PROMPT), *words], capture_output=True, text=True)
        if done.returncode:
            return done.returncode, (done.stderr.strip().splitlines() or [""])[-1], None
        code, found, error = run("diff", recording, dump, "-m", path)
        first = found.get("first_divergence")
        if first:
            return code, first["checkpoint"], (first["diagnosis"] or [{"fault": None}])[0]["fault"]
        wrong = [entry for entry in found.get("checkpoints", []) if entry["verdict"] == "reference"]
        named = [one["fault"] for entry in wrong[:1] for one in entry.get("diagnosis", [])]
        return code, wrong[0]["id"] if wrong else error or found.get("reason"), (named or [None])[0]


def pairs_rotated(q, k, cos, sin, unsqueeze_dim=1):
    def turn(x):
        a, b, half = x[..., ::2], x[..., 1::2], cos.shape[-1] // 2
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    return turn(q), turn(k)


def beneath(model, path, scratch):
    """Mistakes in RoPE of an engine whose rows are in Hugging Face's order."""
    good = True
    base = model.model.rotary_emb.inv_freq.clone()
    model.model.rotary_emb.inv_freq.copy_(5e5 ** -(torch.arange(0, 16, 2) / 16.0))
    capture(model, scratch / "base", "hf")
    model.model.rotary_emb.inv_freq.copy_(base)
    with mock.patch.object(llama_code, "apply_rotary_pos_emb", pairs_rotated):
        capture(model, scratch / "pairs", "hf")
    for name, fault in (("base", "rope.base"), ("pairs", "rope.interleaved")):
        code, found, notes = of_tensors(path, scratch / name)
        right = code == 1 and found == ("blk.0.q_rope", fault) and any("Hugging Face order" in note for note in notes)
        good &= right
        print(f"| llama | {name}, rows as in Hugging Face | | {found[0]}: {found[1]} | | {'' if right else 'WRONG'} |", flush=True)
    return good


def told_of(beside):
    return "" if not beside else f"exit {beside[0]}" + (f" {beside[1]}: {beside[2]}" if beside[0] else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=pathlib.Path, help="where the files stay")
    parser.add_argument("--libraries", type=pathlib.Path, help="llama.cpp's shared libraries")
    given = parser.parse_args()
    good = True
    print("| family | conversion | weights | tensors | llama.cpp beside them | |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        scratch = given.keep or pathlib.Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(given.libraries, scratch)
        for family in families.FAMILIES:
            model, architecture, places = made(family)
            path, saved = scratch / f"{family}.gguf", scratch / family
            families.write(model, architecture, places, path)
            model.save_pretrained(saved)
            weights = of_weights(path, saved)
            for order in ("gguf", "hf") if family == "llama" else (None,):
                capture(model, scratch / f"{family}-{order}", order)
                code, found, notes = of_tensors(path, scratch / f"{family}-{order}")
                said = any("Hugging Face order" in note for note in notes)
                beside = recorder.said(path, scratch / f"{family}-{order}")
                right = weights[0] == 0 and code == 0 and said == (order == "hf") and (not beside or beside[0] == 0)
                good &= right
                told = f"rows as in {order}" if order else "right"
                print(f"| {family} | {told} | exit {weights[0]} | exit {code} {found[0] or ''} | {told_of(beside)} | {'' if right else 'WRONG'} |", flush=True)
            if family == "llama":
                good &= beneath(model, path, scratch)
        for family, spoil, by_weights, by_tensors, order in WRONG:
            model, architecture, places = made(family)
            path, dump = scratch / f"{family}-{spoil.__name__}.gguf", scratch / f"{family}-{spoil.__name__}"
            spoil.model = model
            families.write(model, architecture, places, path, spoil)
            capture(model, dump, order)
            weights, tensors = of_weights(path, scratch / family), of_tensors(path, dump)
            right = weights == (1, by_weights) and tensors[0] == 1
            right &= tensors[1][0].startswith(by_tensors[0]) and by_tensors[1] in (None, tensors[1][1])
            beside = recorder.said(path, dump)
            # The file is what both are judged by: what the conversion changed is wrong in the capture, the reference.
            right &= not beside or beside[0] != 0 and beside[1].startswith(by_tensors[0]) and by_tensors[1] in (None, beside[2])
            good &= right
            told = spoil.__name__.replace("_", " ")
            print(f"| {family} | {told} | {weights[1][0]}: {weights[1][1]} | {tensors[1][0]}: {tensors[1][1]} | {told_of(beside)} | {'' if right else 'WRONG'} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
