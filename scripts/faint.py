#!/usr/bin/env python3
"""Faint mistakes in healthy dumps: a row a little too large, an element a little off, a head that is zero.

    scripts/faint.py OUT [--count N] [--seed S] [--lengths N,N…] [--report FILE] [--jobs N]

Producers are parity's own engine with the shipped tiny model, in bf16 and in f16, each with everything in that type or with
operands of products alone, declared and undeclared, and in f32; dumps of 20 to 600 tokens with 3 decode steps. Of each a tensor
that was recorded is changed in one place, rounded to the type that the engine keeps it in:

  row      one row times 1.005 to 1.02, the factor drawn evenly
  element  one element off by 0.1 times the root mean square of its tensor
  head     what one head gives in one row is zero (queries, keys, values, contexts of attention)

and the dump is audited without a flag.

  located    exit code 1, and the first node is the one that was changed
  elsewhere  exit code 1 at another node                      undecided  exit code 2
  declared   exit code 0; the change moves its row by less than the limit that the answer gives for its node
  PASSED     exit code 0 without that: a false PARITY

The limit of a node is `bound_rel_l2` of the report, the share of its values that rounding may come to. PARITY names the binary
(default: target/release/parity). Needs numpy. Exit code 0: none passed, none is undecided, and 99 % of those above the limit are
located; 1 otherwise; 2: nothing was made.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARITY = pathlib.Path(os.environ.get("PARITY", ROOT / "target/release/parity")).resolve()
MODEL = ROOT / "reference-dumps/models/qwen2-tiny-py-F16.gguf"
DECODED = 3
HEAD = 32
ENGINES = {
    "f32": "f32", "f16": "f16 storage=f16 kv=f16", "bf16": "bf16 storage=bf16 kv=bf16",
    "f16 products": "f16", "bf16 products": "bf16",
}  # fmt: skip
KINDS = ("row", "element", "head")
# Copies of each dump, which are changed and judged at the same time.
PARTS = 4
OUTCOMES = ["located", "elsewhere", "undecided", "declared", "PASSED"]
PER_HEAD = ("q", "k", "v", "q_rope", "k_rope", "attn_ctx")


def rounded(values, numerics):
    """Values in the type that an engine keeps them in."""
    if "storage=f16" in numerics:
        return values.astype(np.float16).astype(np.float32)
    if "storage=bf16" in numerics:
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values.astype(np.float32)


def audit(dump):
    command = [PARITY, "audit", dump, "-m", MODEL, "--threads", "1", "--format", "json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"reason": done.stderr.strip()}


class Producer:
    """A healthy dump, whose first step is changed in place and put back."""

    def __init__(self, out, name, length, declared, part=0):
        self.numerics = ENGINES[name]
        self.name = f"{name}{'' if declared else ', undeclared'}"
        self.key = f"{self.name.replace(', ', '-').replace(' ', '-')}-{length}"
        self.dump = out / f"{self.key}-{part}"
        shutil.rmtree(self.dump, ignore_errors=True)
        tokens = ",".join(str(i * 37 % 250 + 1) for i in range(length))
        command = [PARITY, "run", "-m", MODEL, "--tokens", tokens, "-n", DECODED, "--device", "cpu", "--threads", "1",
                   "--numerics", self.numerics, "--no-audit", "--dump", self.dump]  # fmt: skip
        subprocess.run(list(map(str, command)), capture_output=True, text=True)
        place = self.dump / "manifest.json"
        if not place.exists():
            sys.exit(f"{self.name}: no dump of {length} tokens")
        manifest = json.loads(place.read_text())
        for step in manifest["steps"]:
            step.pop("hashes", None)
        if not declared:
            manifest["producer"] = {"name": "an engine"}
            for key in ("graphs", "provenance"):
                manifest.pop(key, None)
        place.write_text(json.dumps(manifest))
        self.file = self.dump / manifest["steps"][0]["file"]
        data = self.file.read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        self.tensors = {
            name: (8 + size + entry["data_offsets"][0], entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] == "F32"
        }

    def values(self, name):
        offset, shape = self.tensors[name]
        return np.fromfile(self.file, "<f4", int(np.prod(shape)), offset=offset).reshape(shape[0], -1)

    def write(self, name, values):
        with self.file.open("r+b") as file:
            file.seek(self.tensors[name][0])
            file.write(values.astype("<f4").tobytes())

    def healthy(self):
        code, report = audit(self.dump)
        return "" if code == 0 else f"exit code {code}: {report.get('reason')}"

    def changed(self, draw):
        """(tensor, values, what was done), drawn by chance."""
        while True:
            name = draw.choice(sorted(self.tensors))
            values = self.values(name)
            kinds = ["row", "element"] + ["head"] * (name.rsplit(".", 1)[-1] in PER_HEAD)
            kind, row = draw.choice(kinds), draw.randrange(len(values))
            other = values.copy()
            if kind == "row":
                factor = draw.uniform(1.005, 1.02)
                other[row] = rounded(values[row] * factor, self.numerics)
                words = f"row {row} of {len(values)} x {factor:.4f}"
            elif kind == "element":
                column = draw.randrange(values.shape[1])
                off = 0.1 * float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
                other[row, column] = rounded(values[row, column : column + 1] + off, self.numerics)[0]
                words = f"element {column} of row {row} of {len(values)}"
            else:
                head = draw.randrange(values.shape[1] // HEAD)
                other[row, head * HEAD : (head + 1) * HEAD] = 0.0
                words = f"head {head} of row {row} of {len(values)}"
            if not np.array_equal(values, other):
                return name, values, other, kind, row, words

    def judge(self, number, seed):
        draw = random.Random(f"{seed} {self.key} {number}")
        name, values, other, kind, row, words = self.changed(draw)
        self.write(name, other)
        try:
            code, report = audit(self.dump)
        finally:
            self.write(name, values)
        first = (report.get("first_divergence") or {}).get("checkpoint")
        what = f"{self.name}: {name}: {words}"
        if code == 1:
            return kind, *(("located", "") if first == name else ("elsewhere", f"{what}: {first}"))
        if code != 0:
            return kind, "undecided", f"{what}: {report.get('reason')}"
        entry = next((entry for entry in report["checkpoints"] if entry["id"] == name), {})
        bound = ((entry.get("local") or {}).get("candidate") or {}).get("bound_rel_l2")
        moved = float(np.linalg.norm(other[row] - values[row]) / np.linalg.norm(values[row]))
        if bound is not None and moved <= bound:
            return kind, "declared", ""
        return kind, "PASSED", f"{what}: the row is moved by {moved:.2e}, limit {bound}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lengths", default="20,64,200,600")
    parser.add_argument("--report", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lengths = [int(length) for length in given.lengths.split(",")]
    kinds = [(name, length, declared) for name in ENGINES for length in lengths for declared in (True, False)]
    counts, lines, known = collections.defaultdict(collections.Counter), [], threading.Lock()

    def note(name, kind, outcome, line):
        with known:
            counts[name][outcome] += 1
            counts[kind][outcome] += 1
            if line:
                lines.append(line if outcome == "ACCUSED" else f"{outcome}: {line}")
                print(lines[-1], flush=True)
            done = sum(counts[kind].total() for kind in KINDS)
            print(f"\r{done} of {given.count}", end="", file=sys.stderr, flush=True)

    def all_of(at, part):
        name, length, declared = kinds[at]
        producer = Producer(given.out, name, length, declared, part)
        problem = "" if part else producer.healthy()
        if problem:
            note(producer.name, "healthy", "ACCUSED", f"{producer.name}, {length} tokens, unchanged: {problem}")
        for number in range(at + part * len(kinds), given.count, PARTS * len(kinds)):
            note(producer.name, *producer.judge(number, given.seed))
        shutil.rmtree(producer.dump)

    # The longest first: they take most of the time. What is known is told when it is stopped.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    order = sorted(range(len(kinds)), key=lambda at: -kinds[at][1])
    pool, stopped = concurrent.futures.ThreadPoolExecutor(given.jobs), False
    try:
        for one in [pool.submit(all_of, at, part) for at in order for part in range(PARTS)]:
            one.result()
    except KeyboardInterrupt:
        stopped = True
        lines.append("stopped before all were made")
    pool.shutdown(wait=False, cancel_futures=True)
    total = sum((counts[kind] for kind in KINDS), collections.Counter())
    text = [f"{'':28}" + "".join(f"{word:>11}" for word in OUTCOMES)]
    for name, count in [*counts.items(), ("all", total)]:
        text.append(f"{name:28}" + "".join(f"{count[word]:11}" for word in OUTCOMES))
    text = "\n".join([*text, "", *lines]).rstrip() + "\n"
    print("\n" + text)
    if given.report:
        given.report.write_text(text)
    accused = sum(count["ACCUSED"] for count in counts.values())
    above = total["located"] + total["elsewhere"] + total["undecided"] + total["PASSED"]
    if not above:
        return 2
    return 0 if not (stopped or accused or total["PASSED"] or total["undecided"]) and total["located"] >= 0.99 * above else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Audits that are still running when it is stopped are waited for by nobody.
    os._exit(code)
