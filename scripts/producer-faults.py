#!/usr/bin/env python3
"""Every mistake of the catalogue in the first, a middle and the last layer, in each arithmetic that parity knows of.

    scripts/producer-faults.py OUT [PRODUCER…] [--libs FOLDER] [--vulkan FOLDER] [--share S] [--report FILE] [--jobs N]

A producer is a model and an arithmetic of parity's own engine ("F16 bf16 storage=bf16 kv=bf16"), or a real llama.cpp with
the libraries for the CPU in --libs, for Vulkan in --vulkan (llvmpipe is enough). Each mistake is injected into a run of 19
tokens and 3 decode steps of the shipped tiny model, at one of the nodes that it fits, drawn at random but alike in every
call, and the dump is audited without a flag. --share S takes that share of them.

  located    exit code 1, and the first node is the one whose values the mistake changes first
  elsewhere  exit code 1 at another node                      undecided  exit code 2
  declared   exit code 0, and the answer says that it would not see this: the mistake moves its node by less than the bound
             that the report gives of it, or --self-test lists it
  PASSED     exit code 0 without that: a false PARITY
  no effect  every bit is the healthy run's; mistakes that a node has no place for are not counted

PARITY names the binary (default: target/release/parity), CC the C compiler. Needs numpy. Exit code 0: none passed, none was
undecided, and 99 % of those that are not declared are located; 1 otherwise; 2: nothing was made.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "python" / "tests"))

import numpy as np  # noqa: E402
import reading  # noqa: E402

PARITY = pathlib.Path(os.environ.get("PARITY", ROOT / "target/release/parity")).resolve()
MODELS = ROOT / "reference-dumps/models"
TOKENS = [3, 76, 149, 222, 5, 78, 151, 224, 17, 80, 153, 226, 19, 92, 155, 228, 21, 94, 167, 230, 41, 66]
PREFILL = 19
ENGINES = [
    "F16 f32", "F16 f64", "F16 f32 kv=f16", "F16 f16", "F16 bf16", "F16 f16 storage=f16 kv=f16", "F16 bf16 storage=bf16 kv=bf16",
    "F16 llama-cpu", "F16 llama-cpu kv=f16 flash=on", "F16 llama-cuda kv=f16 flash=on", "Q4_K_M f32", "Q4_K_M llama-cpu",
    "Q4_K_M llama-cpu kv=f16 flash=on", "Q4_K_M llama-cuda kv=f16 flash=on",
]  # fmt: skip
REAL = ["F16 llama.cpp on the CPU", "Q4_K_M llama.cpp on the CPU", "F16 llama.cpp on Vulkan", "Q4_K_M llama.cpp on Vulkan"]
LAYERS = (0, 2, 3)
OUTCOMES = ["located", "elsewhere", "undecided", "declared", "PASSED", "no effect"]


def call(*arguments, **environment):
    command = [PARITY, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def audit(dump, model, *flags):
    done = call("audit", dump, "-m", model, "--threads", "1", "--format", "json", *flags)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"reason": done.stderr.strip()}


def norm(values):
    return float(np.sqrt(np.sum(np.square(values, dtype=np.float64))))


class Producer:
    """One that makes dumps of a model, healthy or with a mistake."""

    def __init__(self, name, given):
        kind, self.numerics = name.split(" ", 1)
        self.name, self.given, self.model = name, given, MODELS / f"qwen2-tiny-py-{kind}.gguf"
        self.folder = given.out.resolve() / name.replace(" ", "-")
        self.libs = {"llama.cpp on the CPU": given.libs, "llama.cpp on Vulkan": given.vulkan}.get(self.numerics)
        self.is_real = self.numerics.startswith("llama.cpp")

    def dump(self, name, *inject):
        """Makes a dump; None where there is none."""
        path = self.folder / name
        if self.is_real:
            driver = (self.given.out / "driver").resolve()
            tokens = map(str, TOKENS)
            flags = ["record", "--force", "-o", path, *inject, "--", driver, self.libs, self.model, PREFILL, *tokens]
            call(*flags, DRIVER_THREADS="1", GGML_VK_VISIBLE_DEVICES="0")
        else:
            how = ["--device", "cpu", "--threads", "1", "--numerics", self.numerics, "--no-audit", "--force", "--dump", path]
            if inject:
                call("run", "-m", self.model, "--reference", self.folder / "healthy", *how, *inject)
            else:
                # Tokens that are known: so every run decodes the same ones.
                call("run", "-m", self.model, "--tokens", ",".join(map(str, TOKENS[:PREFILL])), "-n", len(TOKENS) - PREFILL, *how)
        return path if (path / "manifest.json").exists() else None

    def prepare(self):
        """The healthy dump, and what its audit does not see: why it cannot be used, or nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.healthy = self.dump("healthy")
        if self.healthy is None:
            return "no healthy dump"
        code, report = audit(self.healthy, self.model)
        self.order = [entry["id"] for entry in report.get("checkpoints", [])]
        self.values = reading.steps(self.healthy) if code == 0 else []
        unseen = audit(self.healthy, self.model, "--self-test")[1].get("nodes", [])
        self.unseen = {node["id"]: {one["fault"].split("=")[0] for one in node["unseen"]} for node in unseen}
        return "" if code == 0 else f"the healthy one has exit code {code}: {report.get('reason')}"

    def mistakes(self):
        """(fault, node) of what is tried."""
        draw = random.Random(self.name)
        listed = call("faults", "--of", self.healthy if self.is_real else self.model).stdout.splitlines()
        places = collections.defaultdict(list)
        for line in listed:
            spell = line.split("\t")[0]
            layer = spell.split("@")[1].split(".")[1] if "@blk." in spell else ""
            if layer == "" or int(layer) in LAYERS:
                places[spell.split("@")[0].split("=")[0], layer].append(spell)
        chosen = [draw.choice(spells) for spells in places.values()]
        return [(spell, spell.split("@")[1]) for spell in chosen if draw.random() < self.given.share]

    def first_changed(self, dump):
        """The node whose values differ first from the healthy run's, in the order of execution; None where none does."""
        steps = reading.steps(dump)
        differs = {
            name for (_, ours), (_, theirs) in zip(steps, self.values)
            for name in theirs if name in ours and not np.array_equal(ours[name][1], theirs[name][1], equal_nan=True)
        }  # fmt: skip
        return next((name for name in self.order if name in differs), None), steps

    def is_declared(self, fault, node, steps, report):
        """Whether an answer that passes says that it would not see this."""
        if fault in self.unseen.get(node, ()) or fault == "data.f16_rounded" and "storage=f16" in self.numerics:
            return True
        pairs = [(ours[node][1].astype(np.float64), theirs[node][1]) for (_, ours), (_, theirs) in zip(steps, self.values) if node in theirs]
        size = norm(np.concatenate([theirs.ravel() for _, theirs in pairs]))
        moved = norm(np.concatenate([(ours - theirs).ravel() for ours, theirs in pairs])) / size
        entry = next(entry for entry in report["checkpoints"] if entry["id"] == node)
        bound = ((entry.get("local") or {}).get("candidate") or {}).get("bound_rel_l2")
        return bound is not None and moved <= bound

    def judge(self, number, spell):
        """(outcome, what to say of it); None where the node has no place for the mistake."""
        dump = self.dump(f"wrong-{number}", "--inject", spell)
        try:
            if dump is None:
                return None
            node, steps = self.first_changed(dump)
            if node is None:
                return "no effect", ""
            code, report = audit(dump, self.model)
            first = (report.get("first_divergence") or {}).get("checkpoint")
            if code == 1:
                return ("located", "") if first == node else ("elsewhere", f"{first}, and not {node}")
            if code == 0:
                fault = spell.split("@")[0].split("=")[0]
                return "declared" if self.is_declared(fault, node, steps, report) else "PASSED", node
            return "undecided", f"{node}: {report.get('reason')}"
        finally:
            shutil.rmtree(self.folder / f"wrong-{number}", ignore_errors=True)


def table(counts):
    lines = [f"{'':36}" + "".join(f"{word:>11}" for word in OUTCOMES)]
    for name, count in counts.items():
        lines.append(f"{name:36}" + "".join(f"{count[word]:11}" for word in OUTCOMES))
    total = sum(counts.values(), collections.Counter())
    return total, [*lines, f"{'all':36}" + "".join(f"{total[word]:11}" for word in OUTCOMES)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("producers", nargs="*", metavar="PRODUCER")
    for flag in ("libs", "vulkan", "report"):
        parser.add_argument(f"--{flag}", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    source = ROOT / "scripts/record/driver.c"
    subprocess.run([os.environ.get("CC", "cc"), "-O1", "-w", "-o", given.out / "driver", source, "-ldl"], check=True)
    real = [name for name in REAL if (given.libs if "CPU" in name else given.vulkan)]
    counts, lines = {}, []
    for name in given.producers or [*ENGINES, *real]:
        producer = Producer(name, given)
        problem = producer.prepare()
        if problem:
            lines.append(f"{name}: {problem}")
            print(lines[-1], flush=True)
            counts[name] = collections.Counter(undecided=1)
            continue
        counts[name] = collections.Counter()
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            spells = [spell for spell, _ in producer.mistakes()]
            for spell, found in zip(spells, pool.map(producer.judge, range(len(spells)), spells)):
                if found:
                    counts[name][found[0]] += 1
                    if found[0] not in ("located", "no effect", "declared"):
                        lines.append(f"{name}: {spell}: {found[0]} {found[1]}")
                        print(lines[-1], flush=True)
        shutil.rmtree(producer.folder)
        print(table({name: counts[name]})[1][1], flush=True)
    total, text = table(counts)
    text = "\n".join([*text, "", *lines]).rstrip() + "\n"
    print("\n" + text)
    if given.report:
        given.report.write_text(text)
    tried = sum(total[word] for word in OUTCOMES[:3])
    good = not total["PASSED"] and not total["undecided"] and total["located"] >= 0.99 * tried
    return 0 if good and tried else 1 if tried else 2


if __name__ == "__main__":
    sys.exit(main())
