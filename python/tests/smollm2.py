#!/usr/bin/env python3
"""SmolLM2 as Hugging Face lays it out, against its GGUF file: healthy, and with a mistake beneath the order of its rows.

    python/tests/smollm2.py MODEL.gguf [--keep FOLDER]

Rows of queries and keys are captured as they are in the model's module (`qk_order="hf"`), and as the file has them. Needs
torch, transformers, gguf, a built parity (PARITY names the binary) and a model of the llama architecture. Exit code 0:
healthy captures are at parity without any flag and a wrong rope_theta is named; 1 otherwise.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]

import healthy  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402

import parity_dump  # noqa: E402

PROMPT, DECODED = [1, 504, 3575, 282, 4649, 314], [7042, 30, 198]
SAID = "Hugging Face order"


def capture(model, folder, order):
    with torch.no_grad(), parity_dump.capture(model, folder, qk_order=order):
        cache = None
        for ids in (PROMPT, *[[token] for token in DECODED]):
            cache = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values


def audit(dump, path):
    """Exit code, place and name of the first mistake, whether rows were reordered."""
    command = [healthy.BINARY, "audit", dump, "-m", path, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout or "{}")
    first = found.get("first_divergence") or {"checkpoint": None, "diagnosis": []}
    named = first["diagnosis"][0]["fault"] if first["diagnosis"] else None
    return done.returncode, first["checkpoint"], named, any(SAID in note for note in found.get("notes", []))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="a GGUF file of the llama architecture")
    parser.add_argument("--keep", type=pathlib.Path, help="where the dumps stay")
    given = parser.parse_args()
    good = True
    print("| rows of q and k | rope_theta | exit | first mistake | reordered | |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        scratch = given.keep or pathlib.Path(folder)
        model = models.from_gguf(given.model)
        rotary = model.model.rotary_emb
        right, width = rotary.inv_freq.clone(), 2 * len(rotary.inv_freq)
        theta = model.config.rope_parameters["rope_theta"]
        other = (theta / 2.0) ** -(torch.arange(0, width, 2) / width)
        for order, base, frequencies in [("gguf", "right", right), ("hf", "right", right), ("hf", "half", other)]:
            rotary.inv_freq.copy_(frequencies)
            dump = scratch / f"{order}-{base}"
            capture(model, dump, order)
            code, at, named, said = audit(dump, given.model)
            expected = (0, None, None) if base == "right" else (1, "blk.0.q_rope", "rope.base")
            fine = (code, at, named) == expected and said == (order == "hf")
            good &= fine
            print(f"| {order} | {base} | {code} | {at or ''} {named or ''} | {'yes' if said else 'no'} | {'' if fine else 'WRONG'} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
