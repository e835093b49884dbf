#!/usr/bin/env python3
"""Dumps of an engine in numpy that is not llama.cpp, healthy and with one mistake, and what an audit says of each.

    scripts/narrow-engines.py OUT [PATTERN…] [--tokens N,N…] [--report FILE]

The engine runs the shipped tiny model in f32, f16 or bf16 and declares nothing. It rounds what real engines round: values
between nodes, norms and biases, scores of attention, sums over ranks; it has other formulas of SiLU and softmax; it hands over
all checkpoints, outputs of modules, of layers, or logits alone. A case is right where the exit code and the first wrong node
are as wanted; mistakes that an answer states it would not see are counted apart.

PARITY names the binary (default: target/release/parity). Needs numpy and gguf. Exit code 0: all are right.
"""

import argparse
import fnmatch
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "python"))

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import parity_dump  # noqa: E402
from parity_dump._arrays import Bf16  # noqa: E402

PARITY = pathlib.Path(os.environ.get("PARITY", ROOT / "target/release/parity")).resolve()
MODEL = ROOT / "reference-dumps/models/qwen2-tiny-py-F16.gguf"
F = np.float32
LAYERS, HEADS, KV_HEADS, WIDTH = 4, 8, 2, 32


def bf16(x):
    bits = np.asarray(x, F).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(F)


def f16(x):
    return np.asarray(x, F).astype(np.float16).astype(F)


ROUND = {"f32": lambda x: np.asarray(x, F), "f16": f16, "bf16": bf16}
SIGMOIDS = {
    "plain": lambda x: F(1) / (F(1) + np.exp(-x)),
    "tanh": lambda x: F(0.5) + F(0.5) * np.tanh(x * F(0.5)),
    "exp2": lambda x: F(1) / (F(1) + np.exp2(-x * F(1.44269504))),
    "by-sign": lambda x: np.where(x >= 0, F(1), np.exp(-np.abs(x))).astype(F) / (F(1) + np.exp(-np.abs(x))),
    "on-e^x": lambda x: np.exp(x) / (F(1) + np.exp(x)),
}
MODULES = {"embed", "attn_norm", "q", "k", "v", "attn_out", "ffn_norm", "ffn_gate", "ffn_up", "ffn_out", "layer_out", "final_norm", "logits"}
HANDED_OVER = {
    "all": lambda kind: True,
    "modules": MODULES.__contains__,
    "layers": {"embed", "layer_out", "final_norm", "logits"}.__contains__,
    "logits": {"logits"}.__contains__,
    "unrotated": lambda kind: kind not in ("q_rope", "k_rope"),
    "gates within": lambda kind: kind not in ("ffn_gate", "ffn_up"),
}


def float8(mantissa, least, largest):
    """Numbers of eight bits with an exponent, the nearest one to each value."""

    def rounded(x):
        exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), least)
        step = np.exp2(exponent - mantissa)
        return np.clip(np.round(x / step) * step, -largest, largest).astype(F)

    return rounded


E4M3, E5M2 = float8(3, -6, 448.0), float8(2, -14, 57344.0)


def scaled(rounded, largest, axis=-1):
    """Values over a scale that brings the largest along an axis to `largest`: of a head of a token, or of a channel."""

    def kept(x):
        scale = np.maximum(np.abs(x).max(axis, keepdims=True) / F(largest), F(1e-9))
        return (rounded(x / scale) * scale).astype(F)

    return kept


def affine(levels, group):
    """Whole numbers between the least and the largest value of a group of a head."""

    def kept(x):
        parts = x.reshape(*x.shape[:-1], -1, group)
        least = parts.min(-1, keepdims=True)
        step = np.maximum((parts.max(-1, keepdims=True) - least) / F(levels), F(1e-9))
        return (np.round((parts - least) / step) * step + least).astype(F).reshape(x.shape)

    return kept


CACHES = {
    "fp8": E4M3,
    "fp8-e5m2": E5M2,
    "fp8-scaled": scaled(E4M3, 448.0),
    "int8": scaled(np.round, 127.0),
    "int8-channels": scaled(np.round, 127.0, 0),
    "int8-affine": affine(255, 32),
    "int4": scaled(np.round, 7.0),
    "int4-affine": affine(15, 32),
    "int4-groups": affine(15, 16),
    None: lambda x: x,
}
FILE = {t.name: np.asarray(gguf.quants.dequantize(t.data, t.tensor_type), F) for t in gguf.GGUFReader(str(MODEL)).tensors}


class Engine:
    """What it rounds and how it computes; `edit` may change what a node comes to, by its id."""

    def __init__(self, kept="f32", vectors=None, sigmoid="plain", scores="f32", exp2=False, ranks=1, epsilon=1e-6, base=1e6,
                 scale=1.0, cap=0.0, embed_scale=1.0, norm="f32", low_rank=0.0, operands="f32", cache=(None, None), edit=None):  # fmt: skip
        self.round, self.ranks, self.epsilon, self.base = ROUND[kept], ranks, epsilon, base
        self.sigmoid, self.scores, self.exp2, self.scale, self.cap = SIGMOIDS[sigmoid], ROUND[scores], exp2, scale, cap
        self.embed_scale, self.norms, self.low_rank, self.edit = embed_scale, ROUND[norm], low_rank, edit
        self.operand, self.cache = ROUND[operands], [CACHES[one] for one in cache]
        of_vectors = ROUND[vectors or kept]
        self.weights = {name: (of_vectors if w.ndim == 1 else self.round)(w) for name, w in FILE.items()}
        self.values = {}

    def put(self, name, values):
        values = np.asarray(values, F)
        if self.edit is not None:
            values = self.round(self.edit(name, values.copy()))
        self.values[name] = values
        return values

    def norm(self, x, name):
        r = self.norms
        mean = r(np.mean(r(r(x) * r(x)), -1, keepdims=True, dtype=F))
        scale = r(F(1) / r(np.sqrt(r(mean + F(self.epsilon)))))
        return self.round(r(self.round(r(x * scale)) * self.weights[name + ".weight"]))

    def linear(self, x, name, bias=False):
        w = self.weights[name + ".weight"]
        y = (self.operand(x) @ self.operand(w).T).astype(F)
        if self.low_rank and name.endswith("ffn_down"):
            a, b = (np.sin(np.arange(n * 4, dtype=F) * step).reshape(n, 4) for n, step in ((w.shape[1], F(1.3)), (w.shape[0], F(0.7))))
            y = y + F(self.low_rank) * ((x @ a) @ b.T).astype(F)
        return self.round(y + self.weights[name + ".bias"] if bias else y)

    def summed(self, x, name):
        """A matmul whose columns are spread over ranks, each of which rounds its part, and every sum of parts."""
        if self.ranks == 1:
            return self.linear(x, name)
        w = self.weights[name + ".weight"]
        own = w.shape[1] // self.ranks
        parts = [self.round((x[:, i : i + own] @ w[:, i : i + own].T).astype(F)) for i in range(0, w.shape[1], own)]
        total = parts[0]
        for part in parts[1:]:
            total = self.round(total + part)
        return total

    def rotated(self, x, heads):
        r, half = self.round, WIDTH // 2
        x = x.reshape(-1, heads, WIDTH)
        angles = np.arange(len(x), dtype=F)[:, None, None] / F(self.base) ** (np.arange(0, WIDTH, 2, dtype=F) / F(WIDTH))
        cos, sin = r(np.cos(angles)), r(np.sin(angles))
        a, b = x[..., :half], x[..., half:]
        return r(np.concatenate([r(a * cos) - r(b * sin), r(b * cos) + r(a * sin)], -1))

    def attention(self, q, k, v):
        out, r, o = np.zeros_like(q), self.scores, self.operand
        k, v = (self.round(kept(x)) for kept, x in zip(self.cache, (k, v)))
        q, k, v = o(q), o(k), o(v)
        seen = np.tril(np.ones((len(q), len(q)), bool))
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            z = r(r((q[:, head] @ k[:, own].T).astype(F)) * F(self.scale / np.sqrt(WIDTH)))
            if self.cap:
                z = r(F(self.cap) * r(np.tanh(r(z / F(self.cap)))))
            z = np.where(seen, z, F(-np.inf))
            z = z - z.max(-1, keepdims=True)
            p = np.exp2(z * F(1.44269504)) if self.exp2 else np.exp(z)
            p = p / p.sum(-1, keepdims=True)
            out[:, head] = (o(p) if self.scores is ROUND["f32"] else r(p)) @ v[:, own]
        return self.round(out.reshape(len(q), -1))

    def run(self, tokens):
        put, r = self.put, self.round
        x = put("embed", self.weights["token_embd.weight"][tokens])
        x = x if self.embed_scale == 1.0 else r(x * F(self.embed_scale))
        for layer in range(LAYERS):
            at = f"blk.{layer}."
            n = put(at + "attn_norm", self.norm(x, at + "attn_norm"))
            q, k, v = (put(at + part, self.linear(n, at + f"attn_{part}", bias=True)) for part in "qkv")
            q, k = put(at + "q_rope", self.rotated(q, HEADS)), put(at + "k_rope", self.rotated(k, KV_HEADS))
            context = put(at + "attn_ctx", self.attention(q, k, v.reshape(-1, KV_HEADS, WIDTH)))
            x = put(at + "attn_residual", r(x + put(at + "attn_out", self.summed(context, at + "attn_output"))))
            n = put(at + "ffn_norm", self.norm(x, at + "ffn_norm"))
            gate, up = (put(at + part, self.linear(n, at + part)) for part in ("ffn_gate", "ffn_up"))
            act = put(at + "ffn_act", r(r(gate * self.sigmoid(gate)) * up))
            x = put(at + "layer_out", r(x + put(at + "ffn_out", self.summed(act, at + "ffn_down"))))
        put("logits", self.linear(put("final_norm", self.norm(x, "output_norm")), "token_embd"))
        return self.values


def row(name, factor, at=11):
    """One row of a node off by a factor."""

    def edit(id, values):
        if id == name:
            values[at] *= F(factor)
        return values

    return edit


def rows(name, change):
    """Most rows of a node changed."""

    def edit(id, values):
        if id == name:
            values[2 : len(values) - 3] = change(values[2 : len(values) - 3])
        return values

    return edit


def element(name):
    def edit(id, values):
        if id == name:
            values[9, 33] += F(0.1) * np.sqrt(np.mean(values * values))
        return values

    return edit


def head(name, at, which):
    def edit(id, values):
        if id == name:
            values.reshape(len(values), HEADS, WIDTH)[at, which] = 0
        return values

    return edit


def cases():
    """(name, exit code, first wrong node, what is handed over, options)."""
    for kept in ("bf16", "f16"):
        for name, options in {"": {}, "-f32-vectors": {"vectors": "f32"}, "-rounded-scores": {"scores": kept}, "-4-ranks": {"ranks": 4}, "-8-ranks": {"ranks": 8}}.items():
            yield f"{kept}-healthy{name}", 0, "", "all", {"kept": kept, **options}
        for scores in ("f32", kept):
            for name, options in {"scale": {"scale": 1.1}, "cap": {"cap": 50.0}}.items():
                yield f"{kept}-{name}-scores-{scores}", 1, "blk.0.attn_ctx", "all", {"kept": kept, "scores": scores, **options}
        for node in ("blk.1.attn_norm", "blk.2.ffn_norm", "final_norm"):
            yield f"{kept}-{node}-row-1.01", 1, node, "all", {"kept": kept, "edit": row(node, 1.01)}
        for node in ("embed", "blk.1.attn_residual", "blk.1.ffn_act", "blk.2.layer_out", "final_norm"):
            yield f"{kept}-{node}-row-1.05", 1, node, "all", {"kept": kept, "edit": row(node, 1.05)}
        yield f"{kept}-element", 1, "blk.1.ffn_act", "all", {"kept": kept, "edit": element("blk.1.ffn_act")}
        for node in ("blk.1.attn_out", "blk.2.ffn_out"):
            yield f"{kept}-8-ranks-{node}-row-1.05", 1, node, "all", {"kept": kept, "ranks": 8, "edit": row(node, 1.05)}
    for sigmoid in SIGMOIDS:
        yield f"f32-healthy-sigmoid-{sigmoid}", 0, "", "all", {"sigmoid": sigmoid}
    yield "f32-healthy-softmax-exp2", 0, "", "all", {"exp2": True}
    for node in ("blk.1.layer_out", "blk.2.ffn_act", "final_norm"):
        yield f"f32-{node}-rows-in-f16", 1, node, "all", {"edit": rows(node, f16)}
        yield f"f32-{node}-rows-1.0008", 1, node, "all", {"edit": rows(node, lambda x: x * F(1.0008))}
    for at, which in ((7, 3), (10, 6)):
        yield f"f32-head-{which}-zero", 1, "blk.1.attn_ctx", "all", {"edit": head("blk.1.attn_ctx", at, which)}
    for which in ("layers", "modules", "logits"):
        yield f"f32-{which}-healthy", 0, "", which, {}
    for operands in ("f16", "bf16"):
        yield f"f32-healthy-{operands}-operands", 0, "", "all", {"operands": operands}
        yield f"f32-healthy-{operands}-operands-unrotated", 0, "", "unrotated", {"operands": operands}
        yield f"f32-{operands}-operands-unrotated-scale", 1, "blk.0.attn_ctx", "unrotated", {"operands": operands, "scale": 1.1}
        yield f"f32-healthy-{operands}-operands-modules", 0, "", "modules", {"operands": operands}
    for kept in ("bf16", "f16"):
        yield f"{kept}-healthy-gates-within", 0, "", "gates within", {"kept": kept}
        yield f"{kept}-gates-within-ffn_act-row-1.05", 1, "blk.1.ffn_act", "gates within", {"kept": kept, "edit": row("blk.1.ffn_act", 1.05)}
    # What a cache of keys and of values keeps: forms that are followed, and those that nothing tells from a mistake of that size.
    for kept in ("f32", "bf16"):
        for form in ("fp8", "fp8-e5m2", "fp8-scaled", "int8"):
            for side, cache in {"": (form, form), "-keys": (form, None), "-values": (None, form)}.items():
                code = 2 if (kept, side) == ("bf16", "-keys") and form in ("fp8", "fp8-scaled") else 0
                yield f"{kept}-cache-{form}{side}", code, "", "all", {"kept": kept, "cache": cache}
        for form in ("int8-channels", "int8-affine", "int4", "int4-affine", "int4-groups"):
            yield f"{kept}-cache-{form}", 2, "", "all", {"kept": kept, "cache": (form, form)}
    for form in ("fp8", "int8-channels", "int8-affine"):
        yield f"f32-cache-{form}-scale", 1, "blk.0.attn_ctx", "all", {"cache": (form, form), "scale": 1.1}
    yield "f32-modules-epsilon", 1, "blk.0.attn_norm", "modules", {"epsilon": 1e-5}
    yield "f32-layers-epsilon", 1, "blk.0.layer_out", "layers", {"epsilon": 1e-5}
    yield "f32-layers-low-rank", 1, "blk.0.layer_out", "layers", {"low_rank": 1e-3}
    yield "f32-embed-scaled", 1, "blk.0.attn_norm", "all", {"embed_scale": 16.0}


def judged(folder, which, options, count):
    tokens = [(10 + i * 37) % 3000 for i in range(count)]
    values = Engine(**options).run(tokens)
    kept = options.get("kept", "f32")
    stored = {
        "f32": lambda x: x,
        "f16": lambda x: x.astype(np.float16),
        "bf16": lambda x: Bf16((np.asarray(x, F).view(np.uint32) >> 16).astype(np.uint16)),
    }[kept]
    given = {id: stored(x) for id, x in values.items() if HANDED_OVER[which](id.split(".")[-1])}
    shutil.rmtree(folder, ignore_errors=True)
    parity_dump.save(given, str(folder), tokens, producer="numpy")
    done = subprocess.run([PARITY, "audit", folder, "-m", MODEL, "--format", "json", "--allow-missing"], capture_output=True, text=True)
    shutil.rmtree(folder)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"reason": done.stderr}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--tokens", default="20,40")
    parser.add_argument("--report", type=pathlib.Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines, right, all_of_them = [], 0, 0
    for name, code, first, which, options in cases():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in given.patterns):
            continue
        for count in map(int, given.tokens.split(",")):
            found, report = judged(given.out / "dump", which, options, count)
            divergence = report.get("first_divergence") or {}
            named = ", ".join(one["fault"] for one in divergence.get("diagnosis", []))
            is_right = (found, divergence.get("checkpoint") or "") == (code, first)
            right, all_of_them = right + is_right, all_of_them + 1
            said = f"exit {found} {divergence.get('checkpoint') or ''} {named} {report.get('reason') or ''}"
            lines.append(f"{'right' if is_right else 'WRONG':6} {name:36} {count:4} tokens  {said}")
            print(lines[-1][:240], flush=True)
    lines.append(f"{right} of {all_of_them} as wanted")
    print(lines[-1])
    if given.report:
        given.report.write_text("\n".join(lines) + "\n")
    return int(right != all_of_them)


if __name__ == "__main__":
    sys.exit(main())
