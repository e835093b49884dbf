"""Mistakes that several engines are given: where each is wrong first and the names that are right, and model files with one.

A place is a checkpoint id. What an engine does not record of it shows in the first checkpoint behind it that it does.
"""

import contextlib
import shutil

import gguf
import models
import numpy as np

# Of the code. Where a mistake is in all layers, the first is where it shows.
CODE = {
    "rope-pairs": ("blk.0.q_rope", "rope.interleaved"),
    "rope-backwards": ("blk.0.q_rope", "rope.sign"),
    "half-of-rope": ("blk.0.q_rope", "rope.partial"),
    "positions-halved": ("blk.0.q_rope", "rope.scaled"),
    "positions-from-one": ("blk.0.q_rope", "rope.position_shift"),
    "decode-one-behind": ("blk.0.q_rope", "rope.decode_shift"),
    "decode-from-zero": ("blk.0.q_rope", "rope.position_in_step"),
    "keys-without-rope": ("blk.0.k_rope", "rope.none", "rope.position_zero"),  # the same rotation
    "kv-heads-in-turn": ("blk.0.attn_ctx", "attn.kv_head"),
    "first-kv-head": ("blk.0.attn_ctx", "attn.kv_first"),
    "heads-in-reverse": ("blk.0.attn_ctx", "attn.head_order"),
    "no-scale": ("blk.0.attn_ctx", "attn.no_scale"),
    "scale-of-the-width": ("blk.0.attn_ctx", "attn.scale"),
    "no-mask": ("blk.0.attn_ctx", "attn.no_mask"),
    "one-further-seen": ("blk.0.attn_ctx", "attn.mask_shift", "attn.no_mask"),
    "window-of-four": ("blk.0.attn_ctx", "attn.window"),
    "soft-cap": ("blk.0.attn_ctx", "attn.softcap"),
    "own-position-not-seen-in-decoding": ("blk.0.attn_ctx", "attn.stale_cache", "attn.self_only", "attn.mask_shift"),
    "layer-norm": ("blk.1.attn_norm", "norm.layernorm"),
    "gelu": ("blk.0.ffn_act", "ffn.gelu"),
    "activation-on-up": ("blk.1.ffn_act", "ffn.act_on_up", "ffn.swapped"),
    "residual-left-out": ("blk.1.attn_residual", "residual.missing"),
    "residual-of-the-norm": ("blk.1.attn_residual", "residual.wrong_source"),
    "parallel-residual": ("blk.1.ffn_norm", "residual.parallel"),
    "scaled-embedding": ("embed", "embed.scaled"),
    "layer-skipped": ("blk.2.layer_out", "layer.skipped"),
    "logits-scaled": ("logits", "data.scaled"),
    "logits-without-the-norm": ("logits", "logits.no_norm"),
}  # fmt: skip


def registry():
    """(mistakes, mistake): the table of an engine, as that of mistakes.py, and the decorator that fills it.

    What is decorated takes the model, changes the engine, and yields; its name is one of CODE.
    """
    table = {}

    def mistake(change):
        name = change.__name__.replace("_", "-")
        table[name] = (CODE[name][0], CODE[name][1:], contextlib.contextmanager(change))
        return change

    return table, mistake


class WrongFile:
    """A copy of the model's file in which something was changed."""

    def __init__(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(models.TINY, path)
        path.chmod(0o644)
        self.reader = gguf.GGUFReader(path, "r+")

    def number(self, key, value):
        field = self.reader.fields[f"qwen2.{key}"]
        field.parts[field.data[0]][0] = value

    def __getitem__(self, name):
        return next(tensor.data for tensor in self.reader.tensors if tensor.name == name)

    def all(self, end):
        return [tensor.data for tensor in self.reader.tensors if tensor.name.endswith(end)]


def exchange(a, b):
    a[:], b[:] = b.copy(), a.copy()


def in_pairs(weight, heads):
    """The rows of each head as a conversion for RoPE of neighbours orders them."""
    weight[:] = weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape).copy()


def increased(arrays):
    for array in arrays:
        array += 1


# What an engine computes wrongly when its file is another one, where that is, and the names.
FILES = {
    "rope-base": ("blk.0.q_rope", ("rope.base",), lambda file: file.number("rope.freq_base", 1e4)),
    "norm-eps": ("blk.0.attn_norm", ("norm.eps",), lambda file: file.number("attention.layer_norm_rms_epsilon", 1e-3)),
    "no-value-bias": ("blk.1.v", ("linear.no_bias",), lambda file: file["blk.1.attn_v.bias"].fill(0)),
    "query-bias-twice": ("blk.1.q", ("linear.bias_twice", "linear.bias_included"),
        lambda file: np.multiply(file["blk.1.attn_q.bias"], 2, file["blk.1.attn_q.bias"])),
    "no-biases": ("blk.0.q", ("linear.no_bias",), lambda file: [bias.fill(0) for bias in file.all(".bias")]),
    "norm-without-weight": ("blk.1.ffn_norm", ("norm.no_weight",), lambda file: file["blk.1.ffn_norm.weight"].fill(1)),
    "norm-one-plus-weight": ("blk.2.attn_norm", ("norm.unit_offset",),
        lambda file: increased([file["blk.2.attn_norm.weight"]])),
    "norms-one-plus-weight": ("blk.0.attn_norm", ("norm.unit_offset",),
        lambda file: increased(file.all("norm.weight"))),
    "keys-of-another-layer": ("blk.1.k", ("linear.wrong_layer",),
        lambda file: exchange(file["blk.1.attn_k.weight"], file["blk.2.attn_k.weight"])),
    "gate-and-up-exchanged": ("blk.2.ffn_gate", ("linear.wrong_weight", "ffn.swapped"),
        lambda file: exchange(file["blk.2.ffn_gate.weight"], file["blk.2.ffn_up.weight"])),
    "query-and-output-exchanged": ("blk.1.q", ("linear.wrong_weight",),
        lambda file: exchange(file["blk.1.attn_q.weight"], file["blk.1.attn_output.weight"])),
    "transposed-weight": ("blk.1.attn_out", ("linear.transposed",),
        lambda file: exchange(file["blk.1.attn_output.weight"], file["blk.1.attn_output.weight"].T.copy())),
    "transposed-weights": ("blk.0.attn_out", ("linear.transposed",),
        lambda file: [exchange(weight, weight.T.copy()) for weight in file.all("attn_output.weight")]),
    "queries-in-pairs": ("blk.1.q", ("linear.rows_permuted", "linear.qk_permuted"),
        lambda file: in_pairs(file["blk.1.attn_q.weight"], 8)),
    "one-row-zeroed": ("blk.3.ffn_out", ("data.zero",), lambda file: file["blk.3.ffn_down.weight"][7].fill(0)),
}  # fmt: skip
