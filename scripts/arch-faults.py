#!/usr/bin/env python3
"""Makes a real llama.cpp compute single nodes wrongly, in many architectures, and shows what parity says of it.

    ARCHS=folder scripts/archs.sh                 first: models, libraries and healthy recordings, kept in a folder
    scripts/arch-faults.py folder [N] [GLOB…]     N mistakes in each architecture (default 10)
        --count C       in C architectures, spread over those whose names match
        --only NAME     mistakes whose name contains this, at every node of an architecture that has a place for one
        --report FILE   writes what is printed to a file too, with what it was made with

Mistakes are drawn from those that `parity faults --of RECORDING` lists, seeded by the architecture's name, as many
different ones as there are. Each is injected with `parity record --inject`, while the recorded graph stays the
healthy one, and the recording is audited: the first origin must be the node, and the mistake named. Where the
recorded values are those of the healthy recording bit by bit, or within rounding of them, the mistake has no effect
and must not be seen. Exits non-zero where a node was missed, another one accused or a wrong name given.

    PARITY    the parity to test (default: target/release/parity)      JOBS    architectures at a time (default: all processors)
    MODELS    folder of models (default: folder/models)       LIBS    llama.cpp's libraries (default: in the folder)
"""
import argparse, fnmatch, json, os, random, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

root = Path(__file__).resolve().parent.parent
options = argparse.ArgumentParser(usage=__doc__)
options.add_argument("folder", type=Path)
options.add_argument("rest", nargs="*", metavar="[N] [GLOB…]")
options.add_argument("--count", type=int)
options.add_argument("--only", default="")
options.add_argument("--report", type=Path)
options = options.parse_intermixed_args()
folder, globs = options.folder, options.rest
per_model = int(globs.pop(0)) if globs and globs[0].isdigit() else 10
globs = globs or ["*"]
parity = os.environ.get("PARITY", str(root / "target/release/parity"))
models = Path(os.environ.get("MODELS", folder / "models"))
libs = Path(os.environ.get("LIBS", folder / "npm-3.22.1/package/bins/linux-x64"))
driver = folder / "driver"
TOKENS = "3 17 91 42 8 120 64 5 33 77 101 9 55 13 86".split()


def audit(dump, model):
    done = subprocess.run([parity, "audit", dump, "-m", model, "--format", "json"], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        return None, done.stderr + done.stdout[:300]
    return json.loads(done.stdout), ""


def choose(dump, name):
    command = [parity, "faults", "--of", dump, *([options.only] if options.only else [])]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split("\t", 1) for line in listed.splitlines()]
    if options.only:
        return lines
    draw = random.Random(name)
    draw.shuffle(lines)
    chosen, names = [], {}
    # As many different mistakes as there are, then the same ones elsewhere.
    for spell, text in sorted(lines, key=lambda line: lines.index(line)):
        fault = spell.split("@")[0].split("=")[0]
        names[fault] = names.get(fault, 0) + 1
        chosen.append((names[fault], spell, text))
    chosen.sort(key=lambda entry: entry[0])
    return [(spell, text) for _, spell, text in chosen[:per_model]]


def steps(dump):
    return [path.read_bytes() for path in sorted(Path(dump).glob("step-*.safetensors"))]


def one(model, healthy, spell, work):
    dump = Path(work) / "dump"
    subprocess.run(["rm", "-rf", dump], check=True)
    # Grok has scores and probabilities: they are recorded where they are asked for.
    which = ["--checkpoint", "*"] if model.stem.startswith("grok") else []
    command = [parity, "record", "-o", dump, *which, "--inject", spell, "--", driver, libs, model, "12", *TOKENS]
    made = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DRIVER_THREADS": "1"})
    if made.returncode != 0:
        lines = [line for line in made.stderr.splitlines() if "parity" in line or line.startswith("error")]
        return "not-injected", " ".join(lines[-2:])[:160]
    fault, node = spell.split("=")[0].split("@")[0], spell.split("@")[1]
    report, problem = audit(dump, model)
    if report is None:
        return "undecided", problem[:160]
    first = report["first_divergence"]
    if first is None:
        if steps(dump) == steps(healthy):
            return "no-effect", "every bit is the healthy recording's"
        compared = subprocess.run([parity, "diff", dump, healthy, "-m", model], capture_output=True)
        return ("within-rounding", "") if compared.returncode == 0 else ("MISSED", "")
    if first["checkpoint"] != node:
        return "WRONG-NODE", first["checkpoint"]
    names = [found["fault"] for found in first["diagnosis"]]
    if not names:
        return "unnamed", ""
    if names[0] == fault:
        return "named", ""
    return ("among-several", names[0]) if fault in names else ("WRONG-NAME", names[0])


def architecture(model):
    """The lines to print of one model, and what its mistakes came to."""
    healthy, row, lines = folder / "dumps" / model.stem, [], []
    with tempfile.TemporaryDirectory() as work:
        for spell, text in choose(healthy, model.stem):
            result, detail = one(model, healthy, spell, work)
            row.append(result)
            if result.isupper() or result in ("unnamed", "undecided", "not-injected", "among-several"):
                lines.append(f"    {model.stem}: {spell}: {result} {detail} ({text})")
    if row:
        lines.append(f"{model.stem:26} " + " ".join(f"{kind} {row.count(kind)}" for kind in sorted(set(row))))
    return lines, row


chosen = [
    model
    for model in sorted(models.glob("*.gguf"))
    if any(fnmatch.fnmatch(model.stem, glob) for glob in globs)
    and (folder / "dumps" / model.stem / "manifest.json").exists()
]
if not chosen:
    sys.exit(f"{folder} holds no recording of a model of {models} that fits: run scripts/archs.sh with ARCHS={folder} first")
if options.count and options.count < len(chosen):
    chosen = [chosen[i * len(chosen) // options.count] for i in range(options.count)]
counts, written = {}, []
with ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
    for lines, row in pool.map(architecture, chosen):
        for result in row:
            counts[result] = counts.get(result, 0) + 1
        for line in lines:
            print(line, flush=True)
        written += lines
total = sum(counts.values())
seen = total - sum(counts.get(kind, 0) for kind in ("no-effect", "within-rounding", "not-injected"))
summary = f"{total} mistakes in {len(chosen)} architectures: "
summary += ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
if seen:
    summary += f"; of {seen} with an effect {100 * counts.get('named', 0) / seen:.1f} % named first"
print(summary)
if options.report:
    commit = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    head = [
        f"Mistakes in llama.cpp's own graphs: scripts/arch-faults.py at {commit.strip()}, "
        + (f"every {options.only} of each architecture," if options.only else f"{per_model} in each architecture,"),
        "tiny random models, F32, 12 tokens in the prefill and 3 decode steps.",
        "named: the first origin is the node, and the first name the mistake's; no-effect: every bit is that of the healthy",
        "recording; within-rounding: parity diff finds nothing between the two; anything else is listed.",
        "",
    ]
    options.report.write_text("\n".join(head + written + ["", summary]) + "\n")
# Where no mistake took effect, nothing was tried.
sys.exit(any(kind.isupper() for kind in counts) or not seen)
