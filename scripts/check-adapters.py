#!/usr/bin/env python3
"""Engines with adapters of low rank, right ones and wrong ones, on several models, and what parity says of them.

    scripts/check-adapters.py LIBRARIES MODEL…

LIBRARIES is a folder of llama.cpp's shared libraries, MODEL a GGUF file of an architecture that parity has a builder for.
Each model gets a random adapter (scripts/record/lora.py), as a GGUF file and as PEFT saves it, and three recordings:
an engine without a graph that applies it rightly, llama.cpp with it, and both with alpha for alpha / rank. The right
ones must be PARITY, alone and beside one another; the wrong ones must be named lora.alpha at the first matrix; without
--lora the answer must say the rank. Two adapters at once must be PARITY too. Prints a line for each; exits non-zero where
one is not as it should be.

    PARITY   the parity to test (default: target/release/parity)     PYTHON   one with numpy, gguf and safetensors
"""
import json, os, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARITY = os.environ.get("PARITY", str(ROOT / "target/release/parity"))
PYTHON = os.environ.get("PYTHON", sys.executable)
RANK, ALPHA = 4, 8
PREFILL, STEPS = 20, 2
# What every engine can hand over: none of what is inside an adapter.
IDS = set("attn_norm q_proj k_proj v_proj q k v q_norm k_norm q_rope k_rope attn_ctx attn_out attn_residual ffn_norm "
          "ffn_gate ffn_up ffn_act ffn_out layer_out attn_post_norm ffn_post_norm".split())  # fmt: skip
if len(sys.argv) < 3:
    sys.exit(__doc__)
libraries, models = Path(sys.argv[1]).resolve(), [Path(model).resolve() for model in sys.argv[2:]]


def call(*command, **more):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **more)


def engine(model, tokens, loras, work, name):
    """parity's own engine with adapters, as an engine without a graph hands it over."""
    from safetensors.numpy import load_file, save_file

    dump = work / name
    run = [PARITY, "run", "-m", model, "--tokens", tokens, "-n", STEPS, "--device", "cpu", "--no-audit", "--dump", dump]
    done = call(*run, *(word for lora in loras for word in ("--lora", lora)), env={**os.environ, "PARITY_LLAMA": "none"})
    if not (dump / "manifest.json").exists():
        sys.exit(f"{model}: {done.stderr}")
    manifest = json.loads((dump / "manifest.json").read_text())
    manifest.pop("graphs", None)
    manifest["producer"] = {"name": "an engine"}
    for step in manifest["steps"]:
        kept = load_file(dump / step["file"])
        kept = {id: values for id, values in kept.items() if "." not in id or id.split(".")[2:] and id.split(".", 2)[2] in IDS}
        save_file({id: values for id, values in kept.items() if not id.startswith("leaf.")}, dump / step["file"])
    (dump / "manifest.json").write_text(json.dumps(manifest))
    return dump


def llama(model, tokens, loras, work, name):
    env = {**os.environ, "DRIVER_LORA": ",".join(map(str, loras)), "DRIVER_THREADS": "1"}
    done = call(PARITY, "record", "-o", work / name, "--", work / "driver", libraries, model, PREFILL, *tokens.split(","), env=env)
    if done.returncode:
        sys.exit(f"{model}: {done.stderr[-600:]}")
    return work / name


def said(*command):
    done = call(PARITY, *command, "--format", "json")
    if done.returncode not in (0, 1, 2) or not done.stdout:
        return done.returncode, done.stderr.strip(), "", ""
    report = json.loads(done.stdout)
    first = report["first_divergence"] or {"checkpoint": "", "diagnosis": []}
    names = [found["fault"] for found in first["diagnosis"]]
    return report["verdict"], report["reason"] or "", first["checkpoint"], " ".join(names)


bad = 0


def line(model, what, found, good):
    global bad
    bad += not good
    print(f"{model.stem[:32]:32} {what:44} {found[0]:10} {found[2]} {found[3]}{'' if good else '  NOT AS WANTED ' + found[1][:160]}", flush=True)


def of_model(model, work):
    lora = lambda name, alpha, *parts: (call(PYTHON, ROOT / "scripts/record/lora.py", model, work / name, RANK, alpha, *parts, check=True), work / name)[1]
    gguf, folder, wrong = lora("a.gguf", ALPHA), lora("a", ALPHA), lora("wrong.gguf", ALPHA * RANK)
    other = lora("other.gguf", 2 * ALPHA, "attn_q", "attn_output")
    call("cc", "-O1", "-o", work / "driver", ROOT / "scripts/record/driver.c", "-ldl", check=True)
    tokens = ",".join(str(7 * i % 97 + 3) for i in range(PREFILL))
    right = engine(model, tokens, [folder], work, "right")
    with_steps = ",".join(map(str, json.loads((right / "manifest.json").read_text())["tokens"]))
    healthy = lambda found: found[0] == "parity"
    for name, adapter in (("a GGUF file", gguf), ("as PEFT saves it", folder)):
        found = said("audit", right, "-m", model, "--lora", adapter)
        line(model, f"right engine, {name}", found, healthy(found))
    recorded = llama(model, with_steps, [gguf], work, "llama")
    found = said("audit", recorded, "-m", model, "--lora", gguf)
    line(model, "llama.cpp --lora", found, healthy(found))
    found = said("diff", right, recorded, "-m", model, "--lora", gguf)
    line(model, "right engine beside llama.cpp --lora", found, healthy(found))
    named = lambda found: found[0] == "divergence" and found[2].startswith("blk.0.") and found[3].split(" ")[0] == "lora.alpha"
    found = said("audit", engine(model, tokens, [f"{folder}:{RANK}"], work, "alpha"), "-m", model, "--lora", gguf)
    line(model, "engine with alpha for alpha / rank", found, named(found))
    found = said("audit", llama(model, with_steps, [wrong], work, "llama-alpha"), "-m", model, "--lora", gguf)
    line(model, "llama.cpp with a file of alpha for alpha / rank", found, found[0] == "divergence" and found[3] == "lora.alpha")
    report = call(PARITY, "audit", right, "-m", model).stdout
    flat = " ".join(report.split())
    at = flat.find("of rank") if "of rank" in flat else flat.find("has rank")
    line(model, "right engine, no --lora given: rank is said", ("-", flat[:200], flat[max(at - 30, 0) : at + 40] if at >= 0 else "", ""), at >= 0 and "--lora" in flat)
    two = [gguf, f"{other}:0.5"]
    flags = [word for adapter in two for word in ("--lora", adapter)]
    found = said("audit", engine(model, tokens, two, work, "two"), "-m", model, *flags)
    line(model, "right engine, two adapters", found, healthy(found))
    for order in (two, two[::-1]):
        found = said("audit", llama(model, with_steps, order, work, f"llama-two-{order is two}"), "-m", model, *flags)
        line(model, "llama.cpp, two adapters", found, healthy(found))


for model in models:
    with tempfile.TemporaryDirectory() as work:
        of_model(model, Path(work))
print(f"{bad} not as wanted" if bad else "all as wanted")
sys.exit(bool(bad))
