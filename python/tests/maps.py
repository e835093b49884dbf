#!/usr/bin/env python3
"""Maps of names found by values alone, of transformers models of other families than the shipped one.

    python/tests/maps.py [--keep FOLDER] [FAMILY…]

Each family of families.py (Qwen3-MoE, Gemma 3, gpt-oss, Llama) is dumped three times from one forward pass: as forward
hooks see its modules; the same under random names, axes exchanged; and with q, k and v in one tensor. `parity map` has to
propose the right node for everything that it is sure of, for every tensor of a layer that has one, and the map has to
lead to parity. Needs torch, transformers, gguf and a built parity (PARITY names the binary). Exit code 0: so it is; 1
otherwise.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]

import families  # noqa: E402
import healthy  # noqa: E402
import numpy as np  # noqa: E402
import reading  # noqa: E402
import torch  # noqa: E402

TOKENS = families.TOKENS
# Which experts were chosen: whole numbers, that values do not tell from others. The scores tell them.
CHOSEN = ("ffn_moe_topk", "ffn_moe_argsort")


def captured(model, folder):
    """Arrays by checkpoint id, of one pass."""
    healthy.capture(model, None, TOKENS, len(TOKENS), folder)
    return {name: array for name, (_, array) in reading.steps(folder)[0][1].items()}


def distinct(arrays):
    """Without what has the values of another: a matmul without bias is one node under two ids."""
    out = {}
    for name, array in arrays.items():
        same = any(array.size == other.size and np.array_equal(array.ravel(), other.ravel()) for other in out.values())
        if not same and not name.endswith(CHOSEN):
            out[name] = array
    return out


def renamed(arrays, seed):
    """Random names, axes exchanged, and which name is which id."""
    draw, out, truth = random.Random(seed), {}, {}
    names = draw.sample(range(1000), len(arrays))
    for number, (name, array) in zip(names, sorted(arrays.items()), strict=True):
        order = list(range(array.ndim))
        draw.shuffle(order)
        truth[f"x{number:03}"] = [name]
        out[f"x{number:03}"] = np.ascontiguousarray(array.transpose(order))
    return out, truth


QKV = [("q", "k", "v"), ("q_proj", "k_proj", "v_proj")]


def fused(arrays):
    """q, k and v before RoPE side by side, under a name of their own."""
    out, truth = {}, {}
    for name, array in arrays.items():
        stem, _, kind = name.rpartition(".")
        # Without a bias the matmul's id comes first.
        own = next((ids for ids in QKV if kind in ids and all(f"{stem}.{part}" in arrays for part in ids)), None)
        if own:
            parts = [arrays[f"{stem}.{part}"].reshape(len(TOKENS), -1) for part in own]
            name, array = f"{stem}.qkv", np.concatenate(parts, 1)
            truth[name.replace("blk", "stage")] = [f"{stem}.{part}" for part in own]
        else:
            truth.setdefault(name.replace("blk", "stage"), [name])
        out[name.replace("blk", "stage")] = array
    return out, truth


def ids(value):
    """Ids of a line of a map."""
    if isinstance(value, str):
        return [value]
    return [part["id"] for part in value] if isinstance(value, list) else [value["id"]]


# Ids of one node in a graph that has it once.
SAME = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


def plain(name):
    stem, dot, kind = name.rpartition(".")
    return stem + dot + SAME.get(kind, kind)


def proposed(path, model, into):
    """The proposed map, and what was said of it."""
    done = subprocess.run(
        [healthy.BINARY, "map", path, "-m", model, "-o", into], capture_output=True, text=True
    )
    if done.returncode:
        return None, done.stderr.strip()
    return tomllib.loads(into.read_text()), done.stderr.strip().splitlines()[-1]


def wrong_lines(lines, truth):
    """Names whose ids are others than the truth; patterns stand for all layers."""
    out = []
    for name, expected in truth.items():
        layers = name.split(".")
        forms = {name: None}
        for place, part in enumerate(layers):
            if part.isdigit():
                forms[".".join([*layers[:place], "{n}", *layers[place + 1 :]])] = part
        line = next(((lines[form], number) for form, number in forms.items() if form in lines), None)
        if line is None:
            out.append(f"{name}: no line")
        elif [plain(i.replace("{n}", line[1] or "")) for i in ids(line[0])] != [plain(i) for i in expected]:
            out.append(f"{name}: {ids(line[0])} for {expected}")
    return out


def judged(path, model, names):
    done = subprocess.run(
        [healthy.BINARY, "audit", path, "-m", model, "--names", names, "--allow-missing", "--format", "json"],
        capture_output=True, text=True,
    )  # fmt: skip
    report = json.loads(done.stdout or "{}")
    return done.returncode, report.get("reason") or report.get("verdict") or done.stderr.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="qwen3moe, gemma3, gpt-oss, llama; all where none is named")
    parser.add_argument("--keep", type=pathlib.Path, help="where the files stay")
    given = parser.parse_args()
    good = True
    print("| family | dump | map | wrong | audit | |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        scratch = given.keep or pathlib.Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        for family in given.families or families.FAMILIES:
            model, architecture, places = families.FAMILIES[family]()
            path = scratch / f"{family}.gguf"
            families.write(model, architecture, places, path)
            own = distinct(captured(model, scratch / f"{family}-dump"))
            random_names, of_random = renamed(own, seed=7)
            in_one, of_fused = fused(own)
            for name, arrays, truth in [
                ("hooks", families.hooked(model), None), ("random names", random_names, of_random), ("fused", in_one, of_fused)
            ]:  # fmt: skip
                dump, into = scratch / f"{family}-{name}.npz", scratch / f"{family}-{name}.toml"
                into.unlink(missing_ok=True)
                np.savez(dump, tokens=np.array(TOKENS, dtype=np.int32), **arrays)
                lines, said = proposed(dump, path, into)
                wrong = [said] if lines is None else wrong_lines(lines, truth or {})
                code, verdict = judged(dump, path, into) if lines else (2, "no map")
                fine = not wrong and code == 0
                good &= fine
                print(f"| {family} | {name} | {said} | {'; '.join(wrong)} | exit {code}, {verdict} | {'' if fine else 'WRONG'} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
