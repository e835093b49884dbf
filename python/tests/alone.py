#!/usr/bin/env python3
"""Engines that show no more than hidden states, or no more than logits: healthy ones pass, mistakes do not.

    python/tests/alone.py [ENGINE…] [--candle BINARY] [--only NAME] [--keep FOLDER]

transformers in f32 and bf16 with each mistake of mistakes.py and, with --candle (examples/engines/candle, built), candle
with its own bugs and with model files that are not the one it is judged by. Each recording is cut down to what follows
the embedding and the layers, and to the logits, and audited without a flag but --allow-missing. Engines are
transformers-f32, transformers-bf16 and candle. Needs torch, transformers, gguf and a built parity (PARITY names the
binary). Exit code 0: every healthy one has exit code 0; every mistake 1, with the right layer where there are layers, or
in bf16 an answer that says what it would not see, and ten or more of each engine 1; 1 otherwise.
"""

import argparse
import collections
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

import gguf
import mistakes
import models
import numpy as np
import torch

TOKENS = "312,863,2039,1444,1518"
SHOWN = {
    "hidden states": lambda name: name == "embed" or name.endswith(".layer_out"),
    "logits": lambda name: name == "logits",
}
# What cannot show: a shift of all positions changes no score; hidden states end before the last norm.
INVISIBLE = {("positions-from-one", "hidden states"), ("positions-from-one", "logits"),
             ("logits-without-the-norm", "hidden states")}  # fmt: skip


def cut(dump, to, shown):
    """Copies a dump with those of its tensors that `shown` names."""
    shutil.copytree(dump, to)
    manifest = json.loads((to / "manifest.json").read_text())
    if "rows" in manifest:
        manifest["rows"] = {name: rows for name, rows in manifest["rows"].items() if shown(name)}
        (to / "manifest.json").write_text(json.dumps(manifest))
    for step in manifest["steps"]:
        data = (to / step["file"]).read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        header, out, values = json.loads(data[8 : 8 + size]), {}, b""
        for name, entry in header.items():
            if shown(name):
                begin, end = entry["data_offsets"]
                out[name] = {**entry, "data_offsets": [len(values), len(values) + end - begin]}
                values += data[8 + size + begin : 8 + size + end]
        text = json.dumps(out).encode()
        text += b" " * (-len(text) % 8)
        (to / step["file"]).write_bytes(struct.pack("<Q", len(text)) + text + values)


def audit(dump):
    """Exit code, the first checkpoint that is wrong, the reason."""
    command = [mistakes.BINARY, "audit", dump, "-m", models.TINY, "--allow-missing", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(done.stdout) if done.stdout else {"reason": done.stderr.strip()}
    return done.returncode, (report.get("first_divergence") or {}).get("checkpoint"), report.get("reason")


def outcome(name, place, shown, code, first, reason):
    """What an answer is of a dump with a mistake at `place`; of a healthy one where that is None."""
    if place is None or (name, shown) in INVISIBLE:
        return "healthy" if code == 0 else "wrong"
    if code == 0 and "would not be seen" in (reason or ""):
        return "declared"
    layered = shown == "hidden states" and place.startswith("blk.")
    expected = f"blk.{place.split('.')[1]}.layer_out" if layered else "logits" if shown == "logits" else place
    return "found" if code == 1 and first == expected else "wrong"


class WrongFile:
    """A copy of the model's file in which something was changed."""

    def __init__(self, path):
        path.parent.mkdir(parents=True)
        shutil.copy(models.TINY, path)
        path.chmod(0o644)
        self.reader = gguf.GGUFReader(path, "r+")

    def number(self, key, value):
        field = self.reader.fields[f"qwen2.{key}"]
        field.parts[field.data[0]][0] = value

    def __getitem__(self, name):
        return next(tensor.data for tensor in self.reader.tensors if tensor.name == name)


def exchange(a, b):
    a[:], b[:] = b.copy(), a.copy()


# What candle computes wrongly when its file is another one, and where that is.
FILES = {
    "rope-base": ("blk.0.q_rope", lambda file: file.number("rope.freq_base", 1e4)),
    "norm-eps": ("blk.0.attn_norm", lambda file: file.number("attention.layer_norm_rms_epsilon", 1e-3)),
    "no-value-bias": ("blk.1.v", lambda file: file["blk.1.attn_v.bias"].fill(0)),
    "query-bias-twice": ("blk.1.q", lambda file: np.multiply(file["blk.1.attn_q.bias"], 2, file["blk.1.attn_q.bias"])),
    "norm-without-weight": ("blk.1.ffn_norm", lambda file: file["blk.1.ffn_norm.weight"].fill(1)),
    "norm-one-plus-weight": ("blk.2.attn_norm", lambda file: np.add(file["blk.2.attn_norm.weight"], 1, file["blk.2.attn_norm.weight"])),
    "keys-of-another-layer": ("blk.1.k", lambda file: exchange(file["blk.1.attn_k.weight"], file["blk.2.attn_k.weight"])),
    "gate-and-up-exchanged": ("blk.2.ffn_gate", lambda file: exchange(file["blk.2.ffn_gate.weight"], file["blk.2.ffn_up.weight"])),
    "transposed-weight": ("blk.1.attn_out", lambda file: exchange(file["blk.1.attn_output.weight"], file["blk.1.attn_output.weight"].T.copy())),
    "one-row-zeroed": ("blk.3.ffn_out", lambda file: file["blk.3.ffn_down.weight"][7].fill(0)),
}  # fmt: skip
BUGS = {"rope-pairs": "blk.0.q_rope", "kv-head": "blk.0.attn_ctx", "no-q-bias": "blk.0.q"}


def of_transformers(dtype, only):
    """(name, place, a function that records into a folder) of each mistake, and of no mistake."""
    yield "healthy", None, lambda folder: mistakes.capture(None, dtype, folder)
    for name, (place, _, _) in mistakes.MISTAKES.items():
        if name not in mistakes.USUAL["bf16"] and (only is None or name == only):
            yield name, mistakes.checkpoint_of(place), lambda folder, name=name: mistakes.capture(name, dtype, folder)


def of_candle(binary, only):
    """As of_transformers."""

    def recorded(change, *bug):
        def into(folder):
            model = models.TINY
            if change:
                model = folder.parent / f"{folder.name}-model" / models.TINY.name
                change(WrongFile(model))
            subprocess.run([binary, model, TOKENS, "--decode", "8", "--dump", folder, *bug], check=True, capture_output=True)

        return into

    yield "healthy", None, recorded(None)
    for name, place in BUGS.items():
        if only is None or name == only:
            yield name, place, recorded(None, "--bug", name)
    for name, (place, change) in FILES.items():
        if only is None or name == only:
            yield name, place, recorded(change)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE")
    parser.add_argument("--candle", type=pathlib.Path)
    parser.add_argument("--only")
    parser.add_argument("--keep", type=pathlib.Path, help="where the dumps stay")
    given = parser.parse_args()
    engines = {"transformers-f32": of_transformers(torch.float32, given.only),
               "transformers-bf16": of_transformers(torch.bfloat16, given.only)}  # fmt: skip
    if given.candle:
        engines["candle"] = of_candle(given.candle.resolve(), given.only)
    counts = collections.Counter()
    print("| engine | mistake | at | hidden states | logits |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        chosen = {name: cases for name, cases in engines.items() if not given.engines or name in given.engines}
        for engine, cases in chosen.items():
            for name, place, record in cases:
                folder = (given.keep or pathlib.Path(scratch)) / engine / name
                folder.parent.mkdir(parents=True, exist_ok=True)
                record(folder)
                cells = []
                for shown, is_shown in SHOWN.items():
                    part = folder.with_name(f"{name}-{shown.replace(' ', '-')}")
                    cut(folder, part, is_shown)
                    code, first, reason = audit(part)
                    came_to = outcome(name, place, shown, code, first, reason)
                    counts[engine, shown, came_to] += 1
                    said = f" ({came_to}: {reason})" if came_to in ("wrong", "declared") else ""
                    cells.append(f"{code} {first or ''}".strip() + said)
                print(f"| {engine} | {name} | {place or '–'} | {' | '.join(cells)} |", flush=True)
    good = not any(came_to == "wrong" or came_to == "declared" and "bf16" not in engine for engine, _, came_to in counts)
    print()
    for engine in chosen:
        for shown in SHOWN:
            of = {word: counts[engine, shown, word] for word in ("healthy", "found", "declared", "wrong")}
            good &= given.only is not None or of["found"] >= 10
            print(f"{engine}, {shown}: " + ", ".join(f"{count} {word}" for word, count in of.items()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
