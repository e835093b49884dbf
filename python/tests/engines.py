#!/usr/bin/env python3
"""Real engines, healthy and with mistakes, judged by what their hooks give for free and nothing declared.

    python/tests/engines.py [ENGINE-ARITHMETIC…] [--evidence E]… [--asked A]… [--only NAME]… [--candle BINARY]
                            [--keep FOLDER] [--bad FOLDER]

Engines are mlx-f32, mlx-bf16, mlx-f16, tinygrad-f32, tinygrad-half-weights, tinygrad-f16, transformers-f32,
transformers-bf16, transformers-f16, and candle-f32 with --candle (examples/engines/candle, built). Each runs the tiny
model, 5 prompt tokens and 8 decode steps, with mistakes in its own code (known.py, mistakes.py) and with model files
that are not the one it is judged by. Evidence is one of

    modules   outputs of modules, under the engine's own names (candle: all checkpoints): `audit`, `diff` of healthy ones
    hidden    what follows the embedding and the layers: `audit`, `guess --hidden`
    logits    of every row: `audit`, `guess --logits`

Needs gguf, safetensors and the engines' packages (tinygrad also clang), and a built parity (PARITY names the binary). Exit
code 0: healthy ones have exit code 0, every mistake 1 in the right place and none a wrong name, or, where activations are
narrower than f32, an answer that says what it would not see; 1 otherwise.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile

import known
import numpy as np
import reading
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("PARITY", ROOT / "target" / "release" / "parity"))
TINY = ROOT / "reference-dumps" / "models" / "qwen2-tiny-py-F16.gguf"
REFERENCE = ROOT / "reference-dumps" / "qwen2-tiny-py-F16" / "read_lines"
TOKENS = reading.manifest(REFERENCE)["tokens"]
PASSES = [TOKENS[:5], *[[token] for token in TOKENS[5:]]]
EVIDENCE = ("modules", "hidden", "logits")
SLOW = 60  # seconds of processor time that an answer may take
# Where what is wrong at a checkpoint shows that hooks on modules do not see.
BEHIND = {"q_rope": "attn_ctx", "k_rope": "attn_ctx", "attn_ctx": "attn_out", "ffn_act": "ffn_out", "attn_residual": "ffn_norm"}
CANDLE = {"rope-pairs": ("blk.0.q_rope", ("rope.interleaved",)), "kv-head": ("blk.0.attn_ctx", ("attn.kv_head",)),
          "no-q-bias": ("blk.0.q", ("linear.no_bias",))}  # fmt: skip
Case = collections.namedtuple("Case", "name place names record")


def cases(engine, arithmetic):
    """Cases of an engine; `record(folder for a model file)` gives (passes, [{name: array}] of each)."""

    def recorded(change=None, file=None, passes=PASSES):
        def record(folder):
            model = TINY
            if file:
                model = folder / TINY.name
                file(known.WrongFile(model))
            return passes, engine.run(model, arithmetic, change or contextlib.nullcontext, passes)

        return record

    yield Case("healthy", None, (), recorded())
    yield Case("healthy-one-pass", None, (), recorded(passes=[TOKENS]))
    for name, (place, names, change) in engine.MISTAKES.items():
        yield Case(name, place, names, recorded(change))
    for name, (place, names, file) in known.FILES.items():
        if name not in engine.MISTAKES:
            yield Case(name, place, names, recorded(file=file))


class Candle:
    """The example engine: a program that writes a dump of all checkpoints."""

    PRODUCER, STATES, LOGITS = "candle", ("embed", "blk.{n}.layer_out"), "logits"

    def __init__(self, binary):
        self.binary = binary
        self.MISTAKES = {name: (*of, functools.partial(str, name)) for name, of in CANDLE.items()}

    def run(self, model, _, change, passes):
        """As that of the other engines; `change(model)` is the name of a bug."""
        bug = change(model) if change is not contextlib.nullcontext else None
        ids = ",".join(map(str, passes[0]))
        with tempfile.TemporaryDirectory() as folder:
            command = [self.binary, model, ids, "--decode", str(len(passes) - 1), "--dump", f"{folder}/dump"]
            subprocess.run([*command, *(["--bug", bug] if bug else [])], check=True, capture_output=True)
            return [{name: array for name, (_, array) in tensors.items()} for _, tensors in reading.steps(f"{folder}/dump")]


def is_state(engine, name):
    return any(name == state.replace("{n}", part) for state in engine.STATES for part in name.split("."))


def write(engine, evidence, recorded, path):
    """Those tensors of a run that are the evidence, in one file, rows of all passes one after the other."""
    passes, outputs = recorded
    tensors = {}
    for name in outputs[0]:
        if evidence == "hidden" and not is_state(engine, name) or evidence == "logits" and name != engine.LOGITS:
            continue
        rows = [out[name] for out in outputs if name in out]
        axis = 1 if rows[0].ndim > 2 and rows[0].shape[0] == 1 else 0
        tensors[name] = np.ascontiguousarray(np.concatenate(rows, axis))
    tensors["tokens"] = np.array([token for ids in passes for token in ids], np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"producer": engine.PRODUCER, "steps": json.dumps([len(ids) for ids in passes])}
    save_file(tensors, path.with_suffix(".part"), metadata)
    path.with_suffix(".part").rename(path)


def commands(evidence, dump, healthy):
    """{what is asked: the command line of it} for a dump."""
    lines = {"audit": ["audit", dump, "-m", TINY, "--allow-missing"]}
    if evidence == "modules" and healthy:
        lines["diff"] = ["diff", dump, REFERENCE, "-m", TINY, "--allow-missing"]
    if evidence != "modules":
        lines["guess"] = ["guess", f"--{evidence}", dump, "-m", TINY, "--tokens", ",".join(map(str, TOKENS))]
    return lines


def ask(command):
    """(exit code, report, seconds of processor time)"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([BINARY, *command, "--format", "json"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(done.stdout) if done.stdout else {"reason": done.stderr.strip()}
    return done.returncode, report, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def places(case, evidence, exact):
    """The checkpoints where a mistake may be reported, none where the evidence cannot show it."""
    if case.place is None:
        return ()
    if evidence == "logits":
        return ("logits",)
    if evidence == "hidden":
        _, *layer = case.place.split(".")
        return (f"blk.{layer[0]}.layer_out",) if layer else () if case.place == "logits" else (case.place,)
    found = [case.place]
    while not exact and found[-1].split(".")[-1] in BEHIND:
        layer, last = found[-1].rsplit(".", 1)
        found.append(f"{layer}.{BEHIND[last]}")
    if case.name == "no-biases":  # in all three; and what lacks one may be what was recorded before it is added
        found += ["blk.0.k", "blk.0.v", "blk.0.attn_out"]
    return tuple(found)


def outcome(case, asked, expected, code, report):
    """(what an answer is, where, the name): healthy, named, located, passed, declared, undecided, WRONG place, WRONG name."""
    # A shift of all positions changes no score: only in what a cache in f16 rounds it may show.
    silent = not expected or case.name == "positions-from-one"
    if asked == "guess":
        at, name = None, report.get("answer") if code == 1 else None
    else:
        first = report.get("first_divergence") or {}
        at = first.get("checkpoint")
        name = next((entry["fault"] for entry in first.get("diagnosis") or ()), None)
    right = name is not None and name.startswith(case.names)
    if code not in (0, 1, 2):
        came_to = f"WRONG exit code {code}"
    elif code == 0 and silent:
        came_to = "healthy"
    elif not expected:
        came_to = "undecided" if code == 2 else "WRONG: accused"
    elif code != 1:
        said = "would not be seen" in (report.get("reason") or "")
        came_to = "undecided" if code == 2 else "declared" if said else "passed"
    elif asked != "guess" and at not in expected:
        came_to = "WRONG place" if name is None or right else "WRONG place and name"
    else:
        came_to = "named" if right else "located" if name is None else "WRONG name"
    return came_to, at, name


def judge(case, label, evidence, dump, chosen, counts, bad):
    """Asks what is `chosen` of one dump, prints a line for each answer, counts it, and keeps what is not right."""
    expected = places(case, evidence, label == "candle-f32")
    for asked, command in commands(evidence, dump, not expected).items():
        if chosen and asked not in chosen:
            continue
        code, report, seconds = ask(command)
        came_to, at, name = outcome(case, asked, expected, code, report)
        counts[label, evidence, asked, came_to] += 1
        counts[label, evidence, asked, "slow"] += seconds > SLOW
        cells = [label, evidence, asked, case.name, str(code), at or "–", name or "–", came_to, f"{seconds:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        if bad and (came_to not in ("healthy", "named") or seconds > SLOW):
            kept = bad / f"{label}-{case.name}-{evidence}.safetensors"
            shutil.copy(dump, kept)
            line = " ".join(str(kept if part == dump else part) for part in command)
            reason = (report.get("reason") or report.get("text") or "").replace("\n", " ")[:300]
            wanted = f"at {case.place}, {' or '.join(case.names)}"
            said = f"exit {code}, {at}, {name}: **{came_to}**, {seconds:.0f} s. {reason}"
            with open(bad / "REPORT.md", "a") as file:
                file.write(f"- {label} {evidence} `{case.name}` ({wanted}): {asked} says {said}\n  `{BINARY} {line}`\n")


def chosen(given):
    """{label: (engine, arithmetic)} of those asked for; modules of engines are imported only then."""
    arithmetics = {"mlx": ("f32", "bf16"), "tinygrad": ("f32", "half-weights", "f16"), "transformers": ("f32", "bf16")}
    labels = given.engines or [f"{engine}-{kind}" for engine, kinds in arithmetics.items() for kind in kinds]
    for label in labels:
        name, _, arithmetic = label.partition("-")
        if name == "candle":
            yield label, Candle(given.candle.resolve()), "f32"
        else:
            yield label, importlib.import_module(f"of_{name}"), arithmetic


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE-ARITHMETIC")
    parser.add_argument("--evidence", action="append", choices=EVIDENCE)
    parser.add_argument("--asked", action="append", choices=("audit", "diff", "guess"))
    parser.add_argument("--only", action="append")
    parser.add_argument("--candle", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="where the dumps stay; those that lie there are not made again")
    parser.add_argument("--bad", type=pathlib.Path, help="where dumps are copied whose answer is not right, with a REPORT.md")
    given = parser.parse_args()
    if given.bad:
        given.bad.mkdir(parents=True, exist_ok=True)
    counts = collections.Counter()
    print("| engine | evidence | asked | mistake | exit | at | name | | s |\n|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for label, engine, arithmetic in chosen(given):
            for case in cases(engine, arithmetic):
                if given.only and case.name not in given.only:
                    continue
                folder = (given.keep or pathlib.Path(scratch)) / label
                dumps = {evidence: folder / f"{case.name}-{evidence}.safetensors" for evidence in EVIDENCE}
                if not all(dump.exists() for dump in dumps.values()):
                    recorded = case.record(pathlib.Path(scratch) / "model")
                    for evidence, dump in dumps.items():
                        write(engine, evidence, recorded, dump)
                for evidence in given.evidence or EVIDENCE:
                    judge(case, label, evidence, dumps[evidence], given.asked, counts, given.bad)
    return summary(counts)


def summary(counts):
    """Prints what came to what; the exit code."""
    print()
    good = True
    for of in dict.fromkeys(key[:3] for key in counts):
        words = {key[3]: count for key, count in counts.items() if key[:3] == of and count}
        print(f"{' '.join(of)}: " + ", ".join(f"{count} {word}" for word, count in sorted(words.items())))
        narrow = not of[0].endswith("f32")
        allowed = {"named", "located", "healthy"} | ({"declared"} if narrow or of[2] == "guess" else set())
        good &= of[2] == "guess" and not any(word.startswith("WRONG") for word in words) or set(words) <= allowed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
