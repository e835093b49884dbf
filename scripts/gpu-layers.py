#!/usr/bin/env python3
"""Records llama.cpp with a part of its layers on a GPU and judges every recording: with llama.cpp's graph, without, and as if
another engine had made it, of which nothing is known.

  scripts/gpu-layers.py OUT --libs LIBS MODEL…

OUT     gets layers.json and, while it works, the recordings, which are deleted
LIBS    a folder of llama.cpp's shared libraries with a GPU backend
MODEL   GGUF files

Of each model the last product alone is on the GPU, the last half of the layers, and all of them: 40 tokens and three decode
steps. Of each recording, in each of the three forms, it says whether anything is accused, and whether one row of a matmul times 1.2
is found, in the first layer and in the last.

  --parity FILE    the program (default: target/release/parity)

The exit code is 0 if nothing healthy was accused and nothing wrong was passed.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy

TOKENS, STEPS, ROW, FACTOR = 40, 3, 17, 1.2


def without_graphs(manifest):
    manifest.pop("graphs", None)


def of_another(manifest):
    without_graphs(manifest)
    manifest["producer"] = {"name": "another engine", "version": "1"}


FORMS = {"recorded": lambda manifest: None, "without its graph": without_graphs, "another engine's": of_another}


def audit(options, dump, model):
    """Exit code, what is accused, seconds."""
    begun = time.monotonic()
    command = [options.parity, "audit", dump, "-m", model, "--format", "json", "--allow-missing"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        sys.exit(f"{dump}: {done.stderr[-400:]}")
    return done.returncode, report["origins"], report.get("reason"), round(time.monotonic() - begun, 1)


def first_step(dump):
    """The file of the first step, the length of what it says of its tensors, and that."""
    path = sorted(dump.glob("step*.safetensors"))[0]
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        return path, length, json.loads(file.read(length))


def scale(dump, id):
    """Multiplies a row of a recorded tensor."""
    path, length, head = first_step(dump)
    begin, end = head[id]["data_offsets"]
    assert head[id]["dtype"] == "F32", (id, head[id]["dtype"])
    values = numpy.memmap(path, "<f4", "r+", offset=8 + length + begin, shape=((end - begin) // 4,))
    width = values.size // TOKENS
    values[ROW * width:(ROW + 1) * width] *= numpy.float32(FACTOR)
    values.flush()


def layers_of(dump):
    _, _, head = first_step(dump)
    return 1 + max(int(id.split(".")[1]) for id in head if id.startswith("blk."))


def record(options, driver, model, layers, dump):
    ids = [str(i * 37 % 250 + 1) for i in range(TOKENS + STEPS)]
    command = [options.parity, "record", "--force", "-o", dump, "--", driver, options.libs, model, str(TOKENS), *ids]
    environment = {**os.environ, "DRIVER_GPU_LAYERS": str(layers)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{model}, {layers} layers: {(done.stderr or done.stdout)[-400:]}")


def judged(options, work, model, layers, of):
    """One recording in all its forms. Of `of` layers and the last product so many, from the end, are on the GPU."""
    dump = work / "recorded"
    record(options, work / "driver", model, layers, dump)
    rows = []
    for form, change in FORMS.items():
        places = {"blk.0.ffn_up", f"blk.{of - 1}.ffn_up"}
        for spoiled in [None, *sorted(places)]:
            one = work / "one"
            shutil.copytree(dump, one)
            manifest = json.loads((one / "manifest.json").read_text())
            change(manifest)
            (one / "manifest.json").write_text(json.dumps(manifest))
            if spoiled:
                scale(one, spoiled)
            code, origins, reason, seconds = audit(options, one, model)
            good = code == 1 and origins[:1] == [spoiled] if spoiled else not origins and code in (0, 2)
            rows.append({"model": model.name, "layers_on_the_gpu": layers, "form": form, "spoiled": spoiled, "exit": code,
                         "origins": origins, "reason": reason, "seconds": seconds, "good": good})
            print("good " if good else "BAD  ", json.dumps(rows[-1]), flush=True)
            shutil.rmtree(one)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", type=lambda text: Path(text).resolve())
    parser.add_argument("--libs", required=True, type=lambda text: Path(text).resolve())
    parser.add_argument("--parity", default="target/release/parity", type=lambda text: Path(text).resolve())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.out.resolve()) as work:
        source = Path(__file__).parent / "record" / "driver.c"
        subprocess.run(["cc", "-O1", "-o", Path(work) / "driver", source, "-ldl"], check=True)
        for model in options.models:
            record(options, Path(work) / "driver", model, 0, Path(work) / "first")
            of = layers_of(Path(work) / "first")
            for layers in (1, 1 + of // 2, 1 + of):
                rows += judged(options, Path(work), model, layers, of)
    device = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    good = sum(row["good"] for row in rows)
    answer = {"device": device.stdout.strip(), "commit": os.environ.get("PARITY_COMMIT"), "tokens": TOKENS, "steps": STEPS,
              "factor": FACTOR, "good": good, "of": len(rows), "audits": rows}
    (options.out / "layers.json").write_text(json.dumps(answer, indent=1) + "\n")
    print(f"{good} of {len(rows)}")
    sys.exit(0 if good == len(rows) else 1)


if __name__ == "__main__":
    main()
