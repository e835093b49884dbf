#!/usr/bin/env python3
"""Healthy transformers models of every arithmetic, captured as they are and judged without any flag.

    python/tests/healthy.py [--model FILE.gguf] [--flags=--allow-missing] [--keep FOLDER]

Each loaded type, autocast and attention, as a prefill with decode steps and as one pass: against the recording of
llama.cpp that ships with parity, and against exact arithmetic alone. Needs torch, transformers, gguf and a built
parity (PARITY names the binary). Exit code 0: all are at parity; 1 otherwise.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]

import models  # noqa: E402
import reading  # noqa: E402
import torch  # noqa: E402

import parity_dump  # noqa: E402

BINARY = pathlib.Path(os.environ.get("PARITY", ROOT / "target" / "release" / "parity"))
REFERENCE = ROOT / "reference-dumps" / "qwen2-tiny-py-F16" / "read_lines"
# Name, the type that the model is loaded in, the type that autocast casts matmuls to.
ARITHMETICS = [
    ("f32", torch.float32, None), ("f64", torch.float64, None), ("f16", torch.float16, None),
    ("bf16", torch.bfloat16, None), ("autocast-bf16", torch.float32, torch.bfloat16),
    ("autocast-f16", torch.float32, torch.float16),
]  # fmt: skip


def capture(model, cast, tokens, prompt, folder):
    with torch.no_grad(), torch.autocast("cpu", cast) if cast else contextlib.nullcontext():
        with parity_dump.capture(model, folder):
            cache = None
            for ids in (tokens[:prompt], *[[token] for token in tokens[prompt:]]):
                cache = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values


def judge(arguments):
    done = subprocess.run([BINARY, *map(str, arguments), "--format", "json"], capture_output=True, text=True)
    report = json.loads(done.stdout) if done.stdout else {}
    first = (report.get("first_divergence") or {}).get("checkpoint")
    missing = (report.get("coverage") or {}).get("checkpoints_missing")
    said = f"exit {done.returncode}, {report.get('verdict', done.stderr.strip())}"
    return done.returncode == 0, said + (f" at {first}" if first else "") + (f", {missing} missing" if missing else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=models.TINY)
    parser.add_argument("--flags", default="", help="further arguments of parity")
    parser.add_argument("--keep", type=pathlib.Path, help="where the dumps stay, a folder for each")
    given = parser.parse_args()
    tokens = reading.manifest(REFERENCE)["tokens"]
    flags, all_good = ["-m", given.model, *given.flags.split()], True
    print("| loaded as | attention | passes | diff | audit |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, dtype, cast in ARITHMETICS:
            for attention in ("eager", "sdpa"):
                model = models.from_gguf(given.model, dtype, attn_implementation=attention)
                for passes, prompt in (("prefill and decode", 5), ("one", len(tokens))):
                    folder = (given.keep or pathlib.Path(scratch)) / f"{name}-{attention}-{prompt}"
                    capture(model, cast, tokens, prompt, folder)
                    results = [judge(["diff", folder, REFERENCE, *flags]), judge(["audit", folder, *flags])]
                    all_good &= all(good for good, _ in results)
                    print(f"| {name} | {attention} | {passes} | {results[0][1]} | {results[1][1]} |", flush=True)
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
