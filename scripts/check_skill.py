"""Scores the tasks of skills/parity/evaluation; see check-skill.sh.

Usage: check_skill.py PARITY [TASK]...
"""

import json
import os
import pathlib
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import tomllib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "python/tests"))
import reading  # noqa: E402

SKILL = ROOT / "skills/parity"
DUMPS = ROOT / "reference-dumps"
PROMPT = "def read_lines(path):"
# Outputs of modules, as forward hooks on transformers' Qwen2 name them.
MODULES = {
    "embed": "model.embed_tokens", "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "attn_out": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_out": "mlp.down_proj", "layer_out": "",
    "final_norm": "model.norm", "logits": "lm_head",
}
# Names that no map knows.
OWN = {
    "embed": "x0", "attn_norm": "n1", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "q": "query", "k": "key", "v": "val",
    "q_rope": "query_r", "k_rope": "key_r", "attn_ctx": "mix", "attn_out": "wo", "attn_residual": "mid", "ffn_norm": "n2",
    "ffn_gate": "g", "ffn_up": "u", "ffn_act": "gu", "ffn_out": "down", "layer_out": "x", "final_norm": "nf", "logits": "head",
}
# Of a tensor-parallel engine: what each rank has only a part of, along the last or the heads' axis.
PARTS = ("q_proj", "k_proj", "v_proj", "q", "k", "v", "q_rope", "k_rope", "attn_ctx", "ffn_gate", "ffn_up", "ffn_act")


def steps_of_the_skill():
    """The loop of SKILL.md: name of a step -> the commands that it tells to type."""
    loop = (SKILL / "SKILL.md").read_text().split("## The loop")[1].split("\n## ")[0]
    steps = re.split(r"^\d+\. \*\*", loop, flags=re.M)[1:]
    # Code may go on in the next line.
    code = {step.split("**")[0].rstrip(".,"): re.findall(r"`([^`]+)`", step.replace("\n   ", " ")) for step in steps}
    return {name: [line for line in lines if line.startswith(("parity ", "--"))] for name, lines in code.items()}


def split(name):
    """blk.3.q_rope -> (3, q_rope); embed -> (None, embed)"""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else (None, name)


def whole(dump):
    """All steps of a dump as one pass: {id: array}."""
    steps = reading.steps(dump)
    return {name: np.concatenate([tensors[name][1] for _, tensors in steps]) for name in steps[0][1]}


def tokens(dump):
    return np.array(reading.manifest(dump)["tokens"], np.int32)[: sum(len(at) for at, _ in reading.steps(dump))]


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, values in tensors.items():
        kind = {"float32": "F32", "int32": "I32"}[values.dtype.name]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += np.ascontiguousarray(values).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def folder(dump, _):
    """A folder as parity_dump and the C header write it; the arithmetic is not declared."""
    manifest = reading.manifest(dump)
    manifest["producer"] = {"name": "engine"}
    (dump / "manifest.json").write_text(json.dumps(manifest))
    return dump


def single_file(dump, work):
    return write_safetensors(work / "out.safetensors", {"tokens": tokens(dump), **whole(dump)})


def own_names(dump, work):
    tensors = {}
    for name, values in whole(dump).items():
        layer, kind = split(name)
        if kind in OWN:
            tensors[OWN[kind] if layer is None else f"L{layer}/{OWN[kind]}"] = values
    return write_safetensors(work / "out.safetensors", {"tokens": tokens(dump), **tensors})


def modules(dump, work):
    tensors = {"input_ids": tokens(dump)[None]}
    for name, values in whole(dump).items():
        layer, kind = split(name)
        if kind in MODULES:
            module = MODULES[kind] if layer is None else f"model.layers.{layer}.{MODULES[kind]}".rstrip(".")
            # (1, T, width): hooks see a batch, and no heads.
            tensors[module] = values.reshape(1, len(values), -1)
    np.savez(work / "out.npz", **tensors)
    return work / "out.npz"


def ranks(dump, work):
    """Two ranks: halves of heads and columns, the rest on both."""
    for rank in range(2):
        tensors = {"tokens": tokens(dump)}
        for name, values in whole(dump).items():
            axis = 1 if split(name)[1] in PARTS else None
            tensors[name] = values if axis is None else np.array_split(values, 2, axis)[rank]
        (work / "ranks" / f"rank{rank}").mkdir(parents=True)
        write_safetensors(work / "ranks" / f"rank{rank}" / "out.safetensors", tensors)
    return work / "ranks"


FORMS = {"folder": folder, "single-file": single_file, "own-names": own_names, "modules": modules, "ranks": ranks}


class Shop:
    """Where tasks are set up and worked on."""

    def __init__(self, parity, work):
        self.parity, self.work, self.steps = parity, work, steps_of_the_skill()
        self.environment = {**os.environ, "PARITY_LLAMA": "none"}

    def run(self, *args):
        command = [str(self.parity), *map(str, args)]
        return subprocess.run(command, cwd=self.work, env=self.environment, capture_output=True, text=True)

    def engine(self, task):
        """The engine's dump, in the form that it has."""
        file = DUMPS / f"models/qwen2-tiny-py-{task.get('model', 'F16')}.gguf"
        inject = ["--inject", task["inject"]] if "inject" in task else []
        done = self.run("run", "-m", file, "-p", PROMPT, "-n", task.get("decode", 0), "--device", "cpu", "--numerics",
                        task["numerics"], *inject, "--dump", self.work / "dump")
        if not (self.work / "dump/manifest.json").exists():
            sys.exit(f"{task['name']}: no dump: {done.stderr}")
        return file, FORMS[task["form"]](self.work / "dump", self.work)

    def type(self, task, line, file, dump, flags):
        """Types a command of the skill with this task's files in place of the skill's."""
        recording = DUMPS / file.stem / "read_lines"
        mine = {"out": dump, "model.gguf": file, "ref": recording, "map.toml": self.work / "map.toml"}
        words = shlex.split(line)
        if "-m" in words[1:2] or words[0] != "parity":
            sys.exit(f"{task['name']}: no command: {line}")
        return self.run(*[mine.get(word, word) for word in words[1:]], *flags)

    def solve(self, task):
        """(node, fault, exit code, what was printed) after the skill's steps."""
        file, dump = self.engine(task)
        flags, done = [], None
        for step in task["steps"]:
            for line in self.steps[step]:
                if line.startswith("parity map "):
                    # Only where names are not known; what follows then uses the map.
                    if "are not ids" not in done.stdout + done.stderr and task["form"] != "own-names":
                        continue
                    flags = ["--names", self.work / "map.toml"]
                    done = self.type(task, line, file, dump, [])
                elif line.startswith("parity "):
                    done = self.type(task, line, file, dump, [] if line.startswith("parity inspect") else flags)
                elif line not in ("--names map.toml", "--tokens 1,2,3"):
                    sys.exit(f"the skill's step {step} has a flag that this script does not know: {line}")
        printed = done.stdout + done.stderr
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            return None, None, done.returncode, printed
        first = answer.get("first_divergence") or {}
        names = [entry["fault"] for entry in first.get("diagnosis", [])]
        return first.get("checkpoint"), names[0] if names else None, done.returncode, printed


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    tasks = tomllib.loads((SKILL / "evaluation/tasks.toml").read_text())["task"]
    only = sys.argv[2:]
    solved = 0
    chosen = [task for task in tasks if not only or task["name"] in only]
    for task in chosen:
        with tempfile.TemporaryDirectory() as work:
            node, fault, code, printed = Shop(pathlib.Path(sys.argv[1]), pathlib.Path(work)).solve(task)
        right = (node, fault, code) == (task["node"], task["fault"], 1)
        solved += right
        print(f"{'ok  ' if right else 'FAIL'} {task['name']:24} {node} {fault}, exit code {code}", flush=True)
        if not right:
            print(f"     wanted {task['node']} {task['fault']}\n{printed[-2000:]}", file=sys.stderr)
    # A scorer for whom everything is wrong somewhere would score as well.
    healthy = {"name": "healthy", "numerics": "f32", "form": "folder", "decode": 8, "steps": ["Diff"]}
    with tempfile.TemporaryDirectory() as work:
        node, fault, code, printed = Shop(pathlib.Path(sys.argv[1]), pathlib.Path(work)).solve(healthy)
    quiet = (node, fault, code) == (None, None, 0)
    print(f"{'ok  ' if quiet else 'FAIL'} {'a healthy engine':24} {node} {fault}, exit code {code}")
    print(f"{solved} of {len(chosen)}")
    sys.exit(0 if quiet and chosen and solved == len(chosen) else 1)


main()
