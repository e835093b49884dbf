#!/usr/bin/env python3
"""Measures what `parity audit` costs: processor time (user and system) and peak memory, beside its answer.

  scripts/audit-cost.py FOLDER [--made MODEL] [RECORDING=MODEL…]

FOLDER      where the dumps that it makes are kept; those that are there are not made again
RECORDING   a dump, with the model that it is of
--made      computes tokens of this model on the CPU: as one batch, as a batch and decode steps, and both with one
            matmul off by 1.005; such a model is made by `cargo run --release --example gpu synth OUT 0.5B`

  --parity FILE    what to measure (default: target/release/parity)
  --threads N      threads of it (default: all cores)
  --tokens N       tokens of the dumps that are made (default: 64)
  --prefill N      of these in the first batch, where the others are decode steps (default: 12)
  --long N         also one healthy batch of so many tokens (default: none)
  --json FILE      also writes the figures there

Peak memory is that of the process without the pages of the model and of the dump, which are mapped.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

INJECTED = "data.scaled=1.005@blk.1.ffn_up"


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


def resident(pid):
    """Bytes that are the process's own: without pages of files."""
    try:
        with open(f"/proc/{pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return int(fields["RssAnon"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def measured(options, dump, model):
    command = [options.parity, "audit", str(dump), "-m", str(model), "--allow-missing", "--format", "json"]
    command += ["--threads", str(options.threads)] if options.threads else []
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
    parser.add_argument("--made")
    parser.add_argument("--parity", default=str(Path(__file__).parent.parent / "target/release/parity"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=12)
    parser.add_argument("--long", type=int)
    parser.add_argument("--json")
    options = parser.parse_intermixed_args()
    cases = list(made(options)) if options.made else []
    for recording in options.recordings:
        dump, _, model = recording.partition("=")
        cases.append((Path(dump).name, dump, model))
    print(f"{'recording':36} {'seconds':>8} {'wall':>6} {'MiB':>6}  answer")
    figures = {}
    for name, dump, model in cases:
        figures[name] = found = measured(options, dump, model)
        origins = " ".join(found["origins"][:4]) + (" …" if len(found["origins"]) > 4 else "")
        answer = f"{found['verdict']} {origins}".strip()
        print(f"{name:36} {found['seconds']:8} {found['wall']:6} {found['mib']:6}  {answer}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
