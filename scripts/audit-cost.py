#!/usr/bin/env python3
"""Measures what `parity audit` costs: processor time (user and system) and peak memory, beside its answer.

  scripts/audit-cost.py FOLDER [--made MODEL] [--real MODEL] [--small MODEL] [RECORDING=MODEL…]

FOLDER      where the dumps that it makes are kept; those that are there are not made again
RECORDING   a dump, with the model that it is of
--made      computes tokens of this model on the CPU: as one batch, as a batch and decode steps, and both with one
            matmul off by 1.005; such a model is made by `cargo run --release --example gpu synth OUT 0.5B`

--real      an answer within a minute: 88 tokens and 3 decode steps of a real model of 1.5B in Q4_K_M, undeclared: outputs
            of modules alone (as Hugging Face, MLX and tinygrad give them), one layer of them, all checkpoints, two dumps
--small     the same of a small real model in bf16, 12 tokens; and of the tiny model that ships with parity: 600 tokens with
            a faulty attention, and logits alone with a mistake that has no name

  --parity FILE    what to measure (default: target/release/parity)
  --threads N      threads of it (default: all cores)
  --tokens N       tokens of the dumps that are made (default: 64)
  --prefill N      of these in the first batch, where the others are decode steps (default: 12)
  --long N         also one healthy batch of so many tokens (default: none)
  --json FILE      also writes the figures there

Peak memory is that of the process without the pages of the model and of the dump, which are mapped.
"""

import argparse
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

INJECTED = "data.scaled=1.005@blk.1.ffn_up"


# What modules give: no rotated queries and keys, no context of attention.
MODULES = (r"embed|final_norm|logits|blk\.\d+\.(attn_norm|q|k|v|attn_out|attn_residual|ffn_norm|ffn_gate|ffn_up|ffn_out"
           r"|layer_out)")  # fmt: skip
TINY = Path(__file__).parent.parent / "reference-dumps/models/qwen2-tiny-py-F16.gguf"


def tokens_of(count):
    return ",".join(str(i * 37 % 250 + 1) for i in range(count))


def made(options):
    """The dumps that parity's own engine computes: (name, folder, model)."""
    rest = options.tokens - options.prefill
    kinds = [
        (f"{options.tokens} in one batch", options.tokens, 0, None),
        (f"{options.prefill} and {rest} steps", options.prefill, rest, None),
        (f"{options.tokens} in one batch, x 1.005", options.tokens, 0, INJECTED),
        (f"{options.prefill} and {rest} steps, x 1.005", options.prefill, rest, INJECTED),
    ]
    if options.long:
        kinds.append((f"{options.long} in one batch", options.long, 0, None))
    for name, prefill, steps, injected in kinds:
        slug = f"{Path(options.made).stem}-{prefill}-{steps}{'-wrong' if injected else ''}"
        dump = Path(options.folder) / slug
        if not dump.exists():
            command = [options.parity, "run", "-m", options.made, "--tokens", tokens_of(prefill), "-n", str(steps)]
            command += ["--device", "cpu", "--numerics", "llama-cpu", "--no-audit", "--dump", str(dump)]
            command += ["--inject", injected] if injected else []
            # Without a reference nothing is compared, which is no failure here.
            done = subprocess.run(command, capture_output=True, text=True)
            if not dump.exists():
                sys.exit(f"{slug}: {done.stderr or done.stdout}")
        yield name, dump, options.made


def dumped(options, slug, model, count, *more):
    """What parity's own engine computes of so many tokens, as a dump; made once."""
    dump = Path(options.folder) / slug
    if not (dump / "manifest.json").exists():
        command = [options.parity, "run", "-m", model, "--tokens", tokens_of(count), "--device", "cpu", "--no-audit"]
        done = subprocess.run([*map(str, command), *more, "--dump", str(dump)], capture_output=True, text=True)
        if not (dump / "manifest.json").exists():
            sys.exit(f"{slug}: {done.stderr or done.stdout}")
    return dump


def stripped(dump, slug, pattern=".*"):
    """The tensors of a dump whose names fit, of an engine that declares nothing."""
    out, keep = dump.parent / slug, re.compile(f"({pattern})$")
    if (out / "manifest.json").exists():
        return out
    out.mkdir(exist_ok=True)
    manifest = json.loads((dump / "manifest.json").read_text())
    manifest["producer"] = {"name": "an engine"}
    for name in ("graphs", "provenance"):
        manifest.pop(name, None)
    for step in manifest["steps"]:
        step.pop("hashes", None)
        with (dump / step["file"]).open("rb") as source, (out / step["file"]).open("wb") as target:
            (length,) = struct.unpack("<Q", source.read(8))
            header = json.loads(source.read(length))
            header.pop("__metadata__", None)
            kept, at = {}, 0
            for name, tensor in header.items():
                if keep.match(name):
                    size = tensor["data_offsets"][1] - tensor["data_offsets"][0]
                    kept[name] = {**tensor, "data_offsets": [at, at + size]}
                    at += size
            text = json.dumps(kept).encode()
            text += b" " * (-len(text) % 8)
            target.write(struct.pack("<Q", len(text)) + text)
            for name in kept:
                begin, end = header[name]["data_offsets"]
                source.seek(8 + length + begin)
                target.write(source.read(end - begin))
    manifest["rows"] = {name: rows for name, rows in manifest.get("rows", {}).items() if keep.match(name)}
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def within_a_minute(options):
    """What must be answered soon: (name, arguments, seconds that it may take)."""
    if options.real:
        model = ["-m", options.real]
        for numerics in ("f32", "llama-cpu"):
            full = dumped(options, f"real-{numerics}", options.real, 88, "-n", "3", "--numerics", numerics)
            modules = stripped(full, f"real-{numerics}-modules", MODULES)
            whole = stripped(full, f"real-{numerics}-whole")
            yield f"1.5B {numerics}, modules", ["audit", modules, *model], 60
            yield f"1.5B {numerics}, modules, layer 0", ["audit", modules, *model, "--layer", "0"], 10
            yield f"1.5B {numerics}, all checkpoints", ["audit", whole, *model], 45
        both = [Path(options.folder) / f"real-{numerics}-whole" for numerics in ("llama-cpu", "f32")]
        yield "1.5B, two dumps", ["diff", *both, *model], 20
    if options.small:
        full = dumped(options, "small-bf16", options.small, 12, "--numerics", "bf16 storage=bf16 kv=bf16")
        yield "135M bf16, all checkpoints", ["audit", stripped(full, "small-bf16-whole"), "-m", options.small], 30
        faulty = dumped(options, "tiny-600", TINY, 600, "--inject", "attn.scale=0.2@1")
        yield "tiny, 600 tokens, attn.scale", ["audit", stripped(faulty, "tiny-600-whole"), "-m", TINY], 20
        odd = dumped(options, "tiny-odd", TINY, 24, "--inject", "data.offset=0.02@blk.1.ffn_act")
        yield "tiny, logits alone", ["audit", stripped(odd, "tiny-odd-logits", "logits"), "-m", TINY], 5


def resident(pid):
    """Bytes that are the process's own: without pages of files."""
    try:
        with open(f"/proc/{pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return int(fields["RssAnon"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def measured(options, arguments):
    command = [options.parity, *map(str, arguments), "--format", "json"]
    command += ["--threads", str(options.threads)] if options.threads and arguments[0] == "audit" else []
    before = os.times()
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    os.set_blocking(process.stdout.fileno(), False)
    output, peak = b"", 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        output += process.stdout.read() or b""
        time.sleep(0.01)
    output += process.stdout.read() or b""
    after = os.times()
    try:
        report = json.loads(output)
    except ValueError:
        report = {"verdict": "failed", "origins": []}
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return {
        "seconds": round(spent, 1),
        "wall": round(time.monotonic() - begun, 1),
        "mib": round(peak / 2**20),
        "verdict": report["verdict"],
        "origins": report["origins"],
        "exit": process.returncode,
    }


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder")
    parser.add_argument("recordings", nargs="*")
    for flag in ("--made", "--real", "--small"):
        parser.add_argument(flag)
    parser.add_argument("--parity", default=str(Path(__file__).parent.parent / "target/release/parity"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=12)
    parser.add_argument("--long", type=int)
    parser.add_argument("--json")
    options = parser.parse_intermixed_args()
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    cases = list(made(options)) if options.made else []
    for recording in options.recordings:
        dump, _, model = recording.partition("=")
        cases.append((Path(dump).name, dump, model))
    audits = [(name, ["audit", dump, "-m", model, "--allow-missing"], None) for name, dump, model in cases]
    print(f"{'recording':36} {'seconds':>8} {'wanted':>6} {'wall':>6} {'MiB':>6}  answer")
    figures = {}
    for name, arguments, wanted in itertools.chain(audits, within_a_minute(options)):
        figures[name] = found = measured(options, arguments) | {"wanted": wanted}
        origins = " ".join(found["origins"][:4]) + (" …" if len(found["origins"]) > 4 else "")
        answer = f"{found['verdict']} {origins}".strip()
        print(f"{name:36} {found['seconds']:8} {wanted or '':>6} {found['wall']:6} {found['mib']:6}  {answer}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
