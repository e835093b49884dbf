#!/usr/bin/env python3
"""Makes some five hundred healthy recordings and dumps and judges them all: none may be accused, none undecided.

    scripts/healthy.py OUT [PART…] [--report FILE]

PARTS (default: all whose tools are there):
  cpu      llama.cpp's CPU kernels: 14 quantisations, flash attention on and off, one pass, small batches and decode,
           micro-batches
  heads    llama.cpp's CPU kernels: heads of nine widths and groupings
  caches   llama.cpp's CPU kernels: six architectures with caches of nine types
  vulkan   llama.cpp's Vulkan kernels: as cpu and heads (llvmpipe is enough)
  engine   parity's own engine: 14 quantisations, in f32, f64 and with llama.cpp's roundings
  archs    the architectures that llama.cpp runs, one recording of each
  dumps    every dump in --dumps FOLDER, of the model that lies beside it or of --model

  --libs FOLDER     llama.cpp's shared libraries for the CPU      --vulkan FOLDER   those with Vulkan
  --archs FOLDER    test models (tests/data/archs/fill.py)        --dumps FOLDER    dumps of other engines
  --model FILE      the model of dumps that lie beside none       --jobs N          at a time (default: cores)
  --keep-going      judge what was recorded before, record nothing

PARITY names the binary (default: target/release/parity), CC the C compiler (default: cc). Needs numpy and gguf for the
random models of heads. Exit code 0: all that was made is at parity; 1: one is not; 2: nothing was made.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARITY = pathlib.Path(os.environ.get("PARITY", ROOT / "target/release/parity")).resolve()
TINY = ROOT / "reference-dumps/models/qwen2-tiny-py-F16.gguf"
# llama.cpp's numbers of file types, and of types of caches.
TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 10,
         "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_XS": 30}  # fmt: skip
CACHES = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "IQ4_NL": 20}
PLAIN = ("F32", "F16", "BF16")
BUILT = ["qwen2-dense", "llama-dense", "qwen3-dense", "qwen3moe-moe", "gemma3-dense", "gpt-oss-moe"]
HEADS = ["64-8-2", "64-4-4", "80-4-2", "96-4-4", "112-4-2", "128-4-1", "128-8-1", "128-2-2", "256-2-1"]
# Batches and tokens: one pass, small batches with a step of one, more rows than a tile of attention in two micro-batches.
PASSES = {"prefill": ("33", 33, {}), "decode": ("20,9,3", 33, {}), "ubatch": ("90", 92, {"DRIVER_UBATCH": "64"})}


def tokens(n, below=300):
    """So many ids, no two neighbours alike."""
    return [3 + (i * 73 + i // 7 * 11) % (below - 4) for i in range(1, n + 1)]


class Make:
    """What is made, in one folder."""

    def __init__(self, given):
        self.given, self.out = given, given.out.resolve()
        for name in ("models", "dumps", "logs", "bin"):
            (self.out / name).mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CC", "cc")
        for tool in ("driver", "quantize"):
            source = ROOT / "scripts/record" / f"{tool}.c"
            subprocess.run([compiler, "-O1", "-w", "-o", self.out / "bin" / tool, source, "-ldl"], check=True)

    def quantised(self, kind):
        """The shipped tiny model in another type; None where this llama.cpp cannot make it."""
        if kind == "F16":
            return TINY
        path = self.out / "models" / f"qwen2-tiny-py-{kind}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            command = [self.out / "bin/quantize", self.given.libs or self.given.vulkan, TINY, part, str(TYPES[kind])]
            if subprocess.run(command, capture_output=True).returncode == 0:
                part.rename(path)
        return path if path.exists() else None

    def random(self, shape):
        """A random model of these heads."""
        path = self.out / "models" / f"random-{shape}.gguf"
        if not path.exists():
            script = ROOT / "scripts/record/random-model.py"
            subprocess.run([sys.executable, script, path, *shape.split("-")], capture_output=True)
        return path if path.exists() else None

    def record(self, name, libs, model, batches, ids, extra=(), **environment):
        """A function that makes a recording and gives (dump, model), or says why it could not."""

        def job():
            dump = self.out / "dumps" / name
            command = [PARITY, "record", "--force", "-o", dump, *extra, "--", self.out / "bin/driver", libs, model,
                       batches, *ids]  # fmt: skip
            defaults = {"DRIVER_THREADS": "1", "GGML_VK_VISIBLE_DEVICES": "0"}
            return self.made(name, dump, model, command, {**os.environ, **defaults, **environment})

        return name, job

    def run(self, name, model, numerics, ids):
        """The same of parity's own engine; what it says of a reference does not matter."""

        def job():
            dump = self.out / "dumps" / name
            command = [PARITY, "run", "-m", model, "--tokens", ",".join(map(str, ids)), "--numerics", numerics,
                       "--device", "cpu", "--dump", dump, "--force"]  # fmt: skip
            return self.made(name, dump, model, command, os.environ)

        return name, job

    def made(self, name, dump, model, command, environment):
        if model is None:
            return None, None, "no such model"
        if self.given.keep_going and (dump / "manifest.json").exists():
            return dump, model, ""
        shutil.rmtree(dump, ignore_errors=True)
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
        (self.out / "logs" / name).write_text(done.stdout + done.stderr)
        whole = (dump / "manifest.json").exists()
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
        return (dump if whole else None), model, "" if whole else " ".join(last)[:100]


def flash(on):
    return {"DRIVER_FLASH": "on" if on else "off"}


def on_cpu(make, libs, mark):
    for kind in TYPES:
        model = make.quantised(kind)
        for on in (True, False):
            for passes, (batches, n, environment) in PASSES.items():
                name = f"{mark}-{kind}-{'flash' if on else 'plain'}-{passes}"
                yield make.record(name, libs, model, batches, map(str, tokens(n)), **flash(on), **environment)


def of_heads(make, libs, mark):
    for shape in HEADS:
        for on in (True, False):
            name = f"{mark}-heads-{shape}-{'flash' if on else 'plain'}"
            yield make.record(name, libs, make.random(shape), "40,5", map(str, tokens(47)), **flash(on))


def of_caches(make):
    for arch in BUILT:
        model = make.given.archs / f"{arch}.gguf"
        for cache, number in CACHES.items():
            # llama.cpp has block-quantised values with flash attention alone.
            for on, word in [(True, f"{number}")] + ([(False, f"{number}")] if cache in PLAIN else [(False, f"{number},1")]):
                name = f"cache-{arch}-{cache}-{'flash' if on else 'plain'}"
                ids = map(str, tokens(15, 128))
                yield make.record(name, make.given.libs, model, "12", ids, DRIVER_CACHE=word, **flash(on))


def of_engine(make):
    for kind in TYPES:
        for numerics in ("f32", "f64", "llama-cpu"):
            for passes, n in (("short", 9), ("long", 70)):
                yield make.run(f"engine-{kind}-{numerics}-{passes}", make.quantised(kind), numerics, tokens(n))


def of_archs(make):
    for model in sorted(make.given.archs.glob("*.gguf")):
        ids = [3, 17, 91, 42, 8, 120, 64, 5, 33, 77, 101, 9, 55, 13, 86]
        yield make.record(f"arch-{model.stem}", make.given.libs, model, "12", map(str, ids))


def of_dumps(make):
    for manifest in sorted(make.given.dumps.glob("**/manifest.json")):
        dump = manifest.parent
        beside = [m for m in dump.parent.glob("*.gguf") if dump.name.startswith(m.stem + "-")]
        model = beside[0] if beside else make.given.model
        yield f"dump-{dump.name}", lambda dump=dump, model=model: (dump, model, "")


def judge(name, job):
    dump, model, why = job()
    if dump is None:
        return name, "not made", why
    command = [PARITY, "audit", dump, "-m", model, "--allow-missing", "--threads", "1", "--format", "json"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return name, "error", done.stderr.strip().replace("\n", ", ")[:200]
    first = (report.get("first_divergence") or {}).get("checkpoint")
    said = {0: "parity", 1: "diverges", 2: "undecided"}.get(done.returncode, f"exit {done.returncode}")
    return name, said, "" if done.returncode == 0 else f"{first or ''} {report.get('reason') or ''}".strip()[:200]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("parts", nargs="*")
    for flag in ("libs", "vulkan", "archs", "dumps", "model", "report"):
        parser.add_argument(f"--{flag}", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--keep-going", action="store_true")
    given = parser.parse_args()
    make = Make(given)
    parts = {
        "cpu": (given.libs, lambda: on_cpu(make, given.libs, "cpu")),
        "heads": (given.libs, lambda: of_heads(make, given.libs, "cpu")),
        "caches": (given.libs and given.archs, lambda: of_caches(make)),
        "vulkan": (given.vulkan, lambda: [*on_cpu(make, given.vulkan, "vulkan"), *of_heads(make, given.vulkan, "vulkan")]),
        "engine": (given.libs or given.vulkan, lambda: of_engine(make)),
        "archs": (given.libs and given.archs, lambda: of_archs(make)),
        "dumps": (given.dumps, lambda: of_dumps(make)),
    }
    unknown = [part for part in given.parts if part not in parts]
    if unknown:
        parser.error(f"no part {unknown[0]}; parts are {', '.join(parts)}")
    lacking = [part for part in given.parts if not parts[part][0]]
    if lacking:
        parser.error(f"{lacking[0]} needs a folder that was not named: see --help")
    lines, counts = [], collections.defaultdict(collections.Counter)
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for part, (there, jobs) in parts.items():
            if not there or given.parts and part not in given.parts:
                continue
            for name, said, why in pool.map(lambda job: judge(*job), list(jobs())):
                counts[part][said] += 1
                if said != "parity":
                    lines.append(f"{said:10} {name:44} {why}")
                    print(lines[-1], flush=True)
    said = ["parity", "diverges", "undecided", "error", "not made"]
    table = [f"{'':10}" + "".join(f"{word:>11}" for word in said)]
    for part, count in counts.items():
        table.append(f"{part:10}" + "".join(f"{count[word]:11}" for word in said))
    total = sum(counts.values(), collections.Counter())
    table.append(f"{'all':10}" + "".join(f"{total[word]:11}" for word in said))
    text = "\n".join([*table, "", *lines]).rstrip() + "\n"
    print("\n" + text)
    if given.report:
        given.report.write_text(text)
    made = sum(total[word] for word in said[:-1])
    return 2 if made == 0 else int(made != total["parity"])


if __name__ == "__main__":
    sys.exit(main())
