#!/usr/bin/env python3
"""Records llama.cpp's CUDA backend in the geometries of Qwen2.5 and judges every recording: all nodes of all layers.

  scripts/gpu-geometries.py OUT --libs LIBS [--part 0.5B|1.5B]…

OUT     gets geometries-SIZE.json and, while it works, models and recordings, which are deleted
LIBS    a folder of llama.cpp's shared libraries with CUDA, e.g. built by
        `cmake -DGGML_CUDA=ON -DBUILD_SHARED_LIBS=ON … && ninja llama ggml ggml-cpu ggml-cuda`

Seven types of weights with 40 and 256 tokens; F16 and Q4_K_M also with 8, 100 and 508, with flash attention and without;
three decode steps behind each. Of each recording it says whether it is healthy; whether eight matmuls of it, each in
another layer and times 1.005, are found where they are and nothing else is; and what that cost. Of each type one mistake is
injected into llama.cpp itself, and one recording of the CPU is made, whose audit is what the others' cost is compared with.

  --type TYPE      only this type of weights; may repeat
  --parity FILE    the program (default: target/release/parity)
  --synth FILE     the example `gpu`, which makes the models (default: target/release/examples/gpu)
  --workers N      recordings at a time (default: 3)
  --threads N      threads of each audit (default: all cores, divided by the workers)
  --temporary DIR  where models and recordings lie (default: OUT)

The exit code is 0 if nothing healthy was accused and nothing wrong was passed.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy

# llama.cpp's numbers of the types; F16 is what the others are made of.
TYPES = {"F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q5_1": 9, "Q4_K_M": 15, "Q6_K": 18}
# A matmul is scaled by this much: five times less than the catalogue's `data.scaled`.
FACTOR = 1.005
MATMULS = ["q_proj", "k_proj", "v_proj", "attn_out", "ffn_gate", "ffn_up", "ffn_out"]
INJECTED = ("rope.base=10000@blk.3.k_rope", "blk.3.k_rope", "rope.base")
STEPS = 3


def cases():
    """(type, tokens, flash, device, injected)"""
    for kind in TYPES:
        yield kind, 256, "on", "cpu", None
        yield kind, 40, "on", "cuda", INJECTED
        for tokens in (40, 256):
            yield kind, tokens, "on", "cuda", None
    for kind in ("F16", "Q4_K_M"):
        for tokens in (8, 100, 508):
            for flash in ("on", "off"):
                yield kind, tokens, flash, "cuda", None


def audit(options, dump, model):
    """Exit code, report, processor time in seconds."""
    command = [options.parity, "audit", dump, "-m", model, "--format", "json", "-t", str(options.threads)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as child:
        out = child.stdout.read()
        err = child.stderr.read().decode()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    try:
        return child.returncode, json.loads(out), usage.ru_utime + usage.ru_stime
    except ValueError:
        return child.returncode, {"origins": [], "checkpoints": [], "error": err[-300:]}, None


def scale(dump, ids):
    """Multiplies recorded tensors by FACTOR, in all steps; twice with the inverse would leave other bits."""
    for path in dump.glob("step-*.safetensors"):
        with open(path, "r+b") as file:
            length, = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(length))
        for id in ids & head.keys():
            begin, end = head[id]["data_offsets"]
            assert head[id]["dtype"] == "F32", (id, head[id]["dtype"])
            count = (end - begin) // 4
            values = numpy.memmap(path, "<f4", "r+", offset=8 + length + begin, shape=(count,))
            values *= numpy.float32(FACTOR)
            values.flush()


def judged(options, size, models, work, case):
    """One recording, from the program that computes it to its two answers."""
    kind, tokens, flash, device, injected = case
    name = f"{kind}-{tokens}-flash-{flash}-{device}" + ("-injected" if injected else "")
    dump, model = work / name, models / f"{size}-{kind}.gguf"
    environment = {**os.environ, "DRIVER_FLASH": flash, "DRIVER_THREADS": str(options.threads)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    ids = [str(i * 37 % 250 + 1) for i in range(tokens + STEPS)]
    command = [options.parity, "record", "--force", "-o", dump]
    command += ["--inject", injected[0]] if injected else []
    command += ["--", work / "driver", options.libs, model, str(tokens), *ids]
    begun = time.monotonic()
    recorded = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    row = {"type": kind, "tokens": tokens, "flash": flash, "device": device}
    try:
        if recorded.returncode != 0:
            return {**row, "error": (recorded.stderr or recorded.stdout)[-400:]}
        row["record_s"] = round(time.monotonic() - begun, 2)
        code, report, seconds = audit(options, dump, model)
        row |= {"exit": code, "origins": report["origins"], "processor_s": seconds and round(seconds, 2)}
        row |= {"nodes": len(report["checkpoints"]), "error": report.get("error")}
        if injected:
            first = report.get("first_divergence") or {"checkpoint": None, "diagnosis": []}
            named = [found["fault"] for found in first["diagnosis"]][:1]
            good = code == 1 and report["origins"] == [injected[1]] and named == [injected[2]]
            return {**row, "injected": injected[0], "named": named, "good": good}
        row["good"] = code == 0 and not report["origins"]
        largest = max((entry["local"]["candidate"] or {"over_bound": 0})["over_bound"] for entry in report["checkpoints"])
        row["largest_over_bound"] = float(f"{largest:.3g}")
        if device == "cuda" and row["good"]:
            layers = 24 if size == "0.5B" else 28
            # Layers far apart, other ones in each recording, so that no type of layer is left out.
            places = {f"blk.{(3 * i + tokens) % layers}.{matmul}" for i, matmul in enumerate(MATMULS)} | {"logits"}
            scale(dump, places)
            code, report, seconds = audit(options, dump, model)
            row["scaled"] = {"exit": code, "processor_s": seconds and round(seconds, 2),
                             "missed": sorted(places - set(report["origins"])),
                             "accused": sorted(set(report["origins"]) - places)}
            row["good"] = code == 1 and not row["scaled"]["missed"] and not row["scaled"]["accused"]
        return row
    finally:
        shutil.rmtree(dump, ignore_errors=True)


def part(options, size):
    work = Path(options.temporary or options.out).resolve()
    models = work / "models"
    models.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent / "record"
    for tool in ("driver", "quantize"):
        subprocess.run(["cc", "-O1", "-o", work / tool, here / f"{tool}.c", "-ldl"], check=True)
    float_model = models / f"{size}-F16.gguf"
    if not float_model.exists():
        subprocess.run([options.synth, "synth", float_model, f"{size}-F16"], check=True)
    for kind, number in TYPES.items():
        if kind in (options.type or TYPES) and not (models / f"{size}-{kind}.gguf").exists():
            quantise = [work / "quantize", options.libs, float_model, models / f"{size}-{kind}.gguf", str(number)]
            subprocess.run(quantise, check=True, capture_output=True)
    print(f"{size}: models made", flush=True)
    rows = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        wanted = [case for case in cases() if case[0] in (options.type or TYPES)]
        for row in pool.map(lambda case: judged(options, size, models, work, case), wanted):
            rows.append(row)
            print("good " if row.get("good") else "BAD  ", json.dumps(row), flush=True)
    cpu = {row["type"]: row["processor_s"] for row in rows if row["device"] == "cpu" and row.get("processor_s")}
    for row in rows:
        if row["device"] == "cuda" and row["tokens"] == 256 and row.get("processor_s") and row["type"] in cpu:
            row["of_the_cpu_recording"] = round(row["processor_s"] / cpu[row["type"]], 2)
    device = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    answer = {"device": device.stdout.strip(), "commit": os.environ.get("PARITY_COMMIT"), "model": f"{size}, random weights",
              "factor": FACTOR, "good": sum(bool(row.get("good")) for row in rows), "of": len(rows), "recordings": rows}
    (Path(options.out) / f"geometries-{size}.json").write_text(json.dumps(answer, indent=1) + "\n")
    print(f"{size}: {answer['good']} of {answer['of']}", flush=True)
    shutil.rmtree(models)
    return answer["good"] == answer["of"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--libs", required=True, type=lambda text: Path(text).resolve())
    parser.add_argument("--part", action="append", choices=["0.5B", "1.5B"])
    parser.add_argument("--type", action="append", choices=list(TYPES))
    parser.add_argument("--parity", default="target/release/parity", type=lambda text: Path(text).resolve())
    parser.add_argument("--synth", default="target/release/examples/gpu", type=lambda text: Path(text).resolve())
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temporary")
    options = parser.parse_args()
    options.threads = options.threads or max(1, (os.cpu_count() or 1) // options.workers)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    good = [part(options, size) for size in options.part or ["0.5B", "1.5B"]]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
