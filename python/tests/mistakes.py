#!/usr/bin/env python3
"""Thirty-nine mistakes that people make in a Qwen2 in PyTorch, each injected into transformers, captured and audited.

    python/tests/mistakes.py [--dtype f32|bf16] [--only NAME] [--keep FOLDER]

Prints what parity says of each: where, and the name it gives. Needs torch, transformers, gguf and a built parity
(PARITY names the binary). Exit code 0: every mistake is located and none is named wrongly; 1 otherwise.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]

import models  # noqa: E402
import reading  # noqa: E402
import torch  # noqa: E402
from transformers.models.qwen2 import modeling_qwen2 as code  # noqa: E402

import parity_dump  # noqa: E402

BINARY = pathlib.Path(os.environ.get("PARITY", ROOT / "target" / "release" / "parity"))
REFERENCE = ROOT / "reference-dumps" / "qwen2-tiny-py-F16" / "read_lines"
ROPE, EAGER = code.apply_rotary_pos_emb, code.eager_attention_forward
MISTAKES = {}
# What a model that is loaded in bf16 does anyway.
USUAL = {"bf16": {"angles-in-bf16", "frequencies-in-bf16", "norm-in-bf16", "one-matmul-in-tf32", "one-matmul-with-sums-in-f16", "one-softmax-in-bf16"}}


def mistake(place, *names):
    """Registers a context manager of a model: the end of the id that is wrong first, and the names that are right."""

    def register(change):
        MISTAKES[change.__name__.replace("_", "-")] = (place, names, contextlib.contextmanager(change))
        return change

    return register


def layer(model, index=1):
    return model.model.layers[index]


def function(name, replacement):
    return mock.patch.object(code, name, replacement)


def rope(change):
    """RoPE with other arguments or results: change(q, k, cos, sin) -> (q, k)."""
    return function("apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: change(q, k, cos, sin))


def scores(change):
    """Attention whose scaled scores (B, H, T, S) are changed before the mask is added."""

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
        key, value = (code.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        weights = change(torch.matmul(query, key.transpose(2, 3)) * scaling)
        length, seen = weights.shape[-2:]
        causal = torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
        weights = torch.softmax(weights.masked_fill(~causal, float("-inf")), -1, torch.float32).to(query.dtype)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), None

    return function("eager_attention_forward", attention)


def forward(module, change):
    """A module whose result is changed: change(plain result, *arguments)."""
    plain = module.forward
    return mock.patch.object(module, "forward", lambda *a, **k: change(plain(*a, **k), *a))


@mistake("q_rope", "rope.base")
def rope_base(model):
    model.model.rotary_emb.inv_freq.copy_(1e4 ** -(torch.arange(0, 32, 2) / 32.0))
    yield


@mistake("q_rope", "rope.interleaved")
def rope_pairs(model):
    def turn(x, cos, sin):
        a, b, half = x[..., ::2], x[..., 1::2], cos.shape[-1] // 2
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    with rope(lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))):
        yield


@mistake("q_rope", "rope.position_shift")
def positions_from_one(model):
    plain = model.model.rotary_emb.forward
    with mock.patch.object(model.model.rotary_emb, "forward", lambda x, p: plain(x, p + 1)):
        yield


@mistake("q_rope", "rope.decode_shift", "rope.position_shift")
def decode_one_behind(model):
    plain = model.model.rotary_emb.forward
    with mock.patch.object(model.model.rotary_emb, "forward", lambda x, p: plain(x, p - (p[:, :1] > 0).long())):
        yield


@mistake("k_rope", "rope.none", "rope.position_zero")  # the same rotation
def keys_without_rope(model):
    with rope(lambda q, k, cos, sin: (ROPE(q, k, cos, sin)[0], k)):
        yield


@mistake("q_rope", "rope.sign")
def rope_backwards(model):
    with rope(lambda q, k, cos, sin: ROPE(q, k, cos, -sin)):
        yield


@mistake("q_rope", "rope.partial")
def half_of_rope(model):
    def part(x, cos, sin):
        half = x.shape[-1] // 2
        freq = torch.cat((cos[..., : half // 2],) * 2, -1), torch.cat((sin[..., : half // 2],) * 2, -1)
        return torch.cat((ROPE(x[..., :half], x[..., :half], *freq)[0], x[..., half:]), -1)

    with rope(lambda q, k, cos, sin: (part(q, cos, sin), part(k, cos, sin))):
        yield


@mistake("q_rope", "rope.twice", "rope.scaled")  # by 2: the same rotation
def rope_twice(model):
    with rope(lambda q, k, cos, sin: ROPE(*ROPE(q, k, cos, sin), cos, sin)):
        yield


@mistake("blk.0.q_rope", "precision.bf16_frequencies")
def frequencies_in_bf16(model):
    """As `model.to(torch.bfloat16).float()` leaves them: a buffer is converted with the weights."""
    rotary = model.model.rotary_emb
    with mock.patch.object(rotary, "inv_freq", rotary.inv_freq.bfloat16().float()):
        yield


@mistake("q_rope", "precision")
def angles_in_bf16(model):
    with rope(lambda q, k, cos, sin: ROPE(q, k, cos.bfloat16().to(cos), sin.bfloat16().to(sin))):
        yield


@mistake("attn_norm", "norm.eps")
def norm_eps(model):
    for one in model.model.layers:
        one.input_layernorm.variance_epsilon = 1e-3
    yield


@mistake("blk.1.attn_norm", "norm.unit_offset")
def norm_one_plus_weight(model):
    layer(model).input_layernorm.weight.data += 1
    yield


@mistake("blk.1.ffn_norm", "norm.no_weight")
def norm_without_weight(model):
    layer(model).post_attention_layernorm.weight.data.fill_(1)
    yield


@mistake("blk.1.ffn_norm", "norm.none", "norm.missing")
def norm_left_out(model):
    with forward(layer(model).post_attention_layernorm, lambda _, x: x):
        yield


@mistake("blk.1.attn_norm", "norm.layernorm")
def layer_norm(model):
    norm = layer(model).input_layernorm
    with mock.patch.object(norm, "forward", lambda x, plain=norm.forward: plain(x - x.mean(-1, keepdim=True))):
        yield


@mistake("blk.1.ffn_norm", "precision")
def norm_in_bf16(model):
    norm = layer(model).post_attention_layernorm

    def coarse(x):
        y = x.bfloat16()
        return (norm.weight.bfloat16() * y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x)

    with mock.patch.object(norm, "forward", coarse):
        yield


def to_eleven_bits(x):
    """TF32, halves away from zero as `cvt.rna.tf32` rounds them."""
    return ((x.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


@mistake("blk.1.ffn_up", "precision.tf32", "precision.f16_operands")
def one_matmul_in_tf32(model):
    up = layer(model).mlp.up_proj
    with forward(up, lambda _, x: (to_eleven_bits(x.contiguous()) @ to_eleven_bits(up.weight).T)):
        yield


@mistake("blk.1.attn_out", "precision.f16_sum")
def one_matmul_with_sums_in_f16(model):
    out = layer(model).self_attn.o_proj

    def summed(x):
        total = torch.zeros(*x.shape[:-1], out.weight.shape[0], dtype=torch.float16)
        for i in range(x.shape[-1]):
            total += x[..., i, None].half() * out.weight[:, i].half()
        return total.to(x)

    with forward(out, lambda _, x: summed(x)):
        yield


@mistake("blk.1.attn_ctx", "precision.bf16_softmax")
def one_softmax_in_bf16(model):
    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **more):
        if module.layer_idx != 1:
            return EAGER(module, query, key, value, attention_mask, scaling, dropout, **more)
        key, value = (code.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        weights = torch.matmul(query, key.transpose(2, 3)) * scaling
        length, seen = weights.shape[-2:]
        causal = torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
        weights = torch.softmax(weights.masked_fill(~causal, float("-inf")).bfloat16(), -1).to(query)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), None

    with function("eager_attention_forward", attention):
        yield


@mistake("blk.1.q", "linear.no_bias")
def no_query_bias(model):
    layer(model).self_attn.q_proj.bias.data.zero_()
    yield


@mistake("blk.1.v", "linear.bias_twice", "linear.bias_included")  # added again to what has it
def value_bias_twice(model):
    layer(model).self_attn.v_proj.bias.data *= 2
    yield


@mistake("blk.1.v", "linear.wrong_layer")
def bias_of_another_layer(model):
    layer(model).self_attn.v_proj.bias.data.copy_(layer(model, 2).self_attn.v_proj.bias.data)
    yield


@mistake("blk.1.attn_out", "linear.wrong_layer")
def weight_of_another_layer(model):
    layer(model).self_attn.o_proj.weight.data.copy_(layer(model, 2).self_attn.o_proj.weight.data)
    yield


@mistake("blk.1.k", "linear.wrong_layer")
def weight_and_bias_of_another_layer(model):
    layer(model).self_attn.k_proj.load_state_dict(layer(model, 2).self_attn.k_proj.state_dict())
    yield


@mistake("blk.1.attn_out", "linear.transposed")
def transposed_weight(model):
    weight = layer(model).self_attn.o_proj.weight
    weight.data = weight.data.T.contiguous()
    yield


@mistake("blk.1.q", "linear.rows_permuted", "linear.qk_permuted", "data.permuted")
def weights_permuted_and_biases_not(model):
    weight = layer(model).self_attn.q_proj.weight
    weight.data = weight.data.reshape(8, 2, 16, -1).swapaxes(1, 2).reshape(weight.shape).contiguous()
    yield


@mistake("attn_ctx", "attn.kv_head")
def kv_heads_in_turn(model):
    with function("repeat_kv", lambda x, n: x.repeat(1, n, 1, 1)):
        yield


@mistake("attn_ctx", "attn.no_scale")
def no_scale(model):
    with scores(lambda x: x * 32**0.5):
        yield


@mistake("attn_ctx", "attn.scale")
def scale_of_the_width(model):
    with scores(lambda x: x * (32 / 256) ** 0.5):
        yield


@mistake("attn_ctx", "attn.no_mask")
def no_mask(model):
    def attention(module, query, key, value, attention_mask, scaling, **rest):
        return EAGER(module, query, key, value, None, scaling, **rest)

    with function("eager_attention_forward", attention):
        yield


@mistake("attn_ctx", "attn.window")
def window_of_four(model):
    def window(x):
        length, seen = x.shape[-2:]
        far = torch.ones(length, seen, dtype=torch.bool).tril(seen - length - 4)
        return x.masked_fill(far, float("-inf"))

    with scores(window):
        yield


@mistake("attn_ctx", "attn.softcap")
def soft_cap(model):
    with scores(lambda x: 5 * torch.tanh(x / 5)):
        yield


@mistake("attn_ctx", "attn.clamp", "attn.clamped")
def clamped_scores(model):
    with scores(lambda x: x.clamp(-2, 2)):
        yield


@mistake("attn_ctx", "attn.head_order")
def heads_in_reverse(model):
    def attention(module, *arguments, **options):
        out, weights = EAGER(module, *arguments, **options)
        return out.flip(2), weights

    with function("eager_attention_forward", attention):
        yield


@mistake("attn_ctx", "attn.stale_cache", "attn.self_only", "attn.mask_shift")
def own_position_not_seen_in_decoding(model):
    def attention(module, query, key, value, attention_mask, scaling, **rest):
        if query.shape[2] == 1:
            key, value = key[:, :, :-1], value[:, :, :-1]
        return EAGER(module, query, key, value, None if query.shape[2] == 1 else attention_mask, scaling, **rest)

    with function("eager_attention_forward", attention):
        yield


@mistake("ffn_act", "ffn.gelu")
def gelu(model):
    for one in model.model.layers:
        one.mlp.act_fn = torch.nn.GELU()
    yield


@mistake("blk.1.ffn_act", "ffn.act_on_up", "ffn.swapped")  # two names of one
def activation_on_up(model):
    mlp = layer(model).mlp
    with mock.patch.object(mlp, "forward", lambda x: mlp.down_proj(mlp.gate_proj(x) * mlp.act_fn(mlp.up_proj(x)))):
        yield


@mistake("blk.1.attn_residual", "residual.missing")
def residual_left_out(model):
    one = layer(model)

    def without(hidden_states, **options):
        attended, _ = one.self_attn(hidden_states=one.input_layernorm(hidden_states), **options)
        return attended + one.mlp(one.post_attention_layernorm(attended))

    with mock.patch.object(one, "forward", without):
        yield


@mistake("embed", "embed.scaled")
def scaled_embedding(model):
    with forward(model.model.embed_tokens, lambda y, _: y * 16):
        yield


@mistake("logits", "logits.no_norm")
def logits_without_the_norm(model):
    held, head = {}, model.lm_head.forward
    with forward(model.model.norm, lambda y, x: held.update(x=x) or y):
        with mock.patch.object(model.lm_head, "forward", lambda _: head(held["x"])):
            yield


def checkpoint_of(place):
    """The checkpoint of a place: of a mistake in all layers, the first one's."""
    return place if place.startswith("blk.") or place in ("embed", "logits") else f"blk.0.{place}"


def capture(name, dtype, folder):
    """A prompt and decode steps of the model with a mistake, or as it is where `name` is None."""
    tokens = reading.manifest(REFERENCE)["tokens"]
    model = models.from_gguf(dtype=dtype, attn_implementation="eager")
    change = MISTAKES[name][2](model) if name else contextlib.nullcontext()
    with torch.no_grad(), change, parity_dump.capture(model, folder):
        cache = None
        for ids in (tokens[:5], *[[token] for token in tokens[5:]]):
            cache = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values


def judge(name, dtype, folder):
    """(located, named): whether the right node is the first, and the name given; None where there is none."""
    capture(name, dtype, folder)
    command = [BINARY, "audit", folder, "-m", models.TINY, "--allow-missing", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        return "", None, done.stderr.strip()
    first = json.loads(done.stdout)["first_divergence"] or {"checkpoint": "", "diagnosis": []}
    fault = first["diagnosis"][0]["fault"] if first["diagnosis"] else None
    return first["checkpoint"], fault, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--only", choices=MISTAKES)
    parser.add_argument("--keep", type=pathlib.Path, help="where the dumps stay, a folder for each mistake")
    given = parser.parse_args()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[given.dtype]
    located = named = wrong = 0
    usual = USUAL.get(given.dtype, set())
    chosen = [given.only] if given.only else [name for name in MISTAKES if name not in usual]
    print("| mistake | expected at | found at | named |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen:
            place, names, _ = MISTAKES[name]
            checkpoint, fault, error = judge(name, dtype, (given.keep or pathlib.Path(scratch)) / name)
            expected = checkpoint_of(place)
            right = fault is not None and any(fault.startswith(good) for good in names)
            located += checkpoint == expected
            named += right
            wrong += fault is not None and not right
            print(f"| {name} | {expected} | {checkpoint or 'nothing'} | {fault or '–'}{'' if right or not fault else ' (wrong)'} | {error}")
    print(f"\n{given.dtype}: {len(chosen)} mistakes, {located} located, {named} named, {wrong} named wrongly")
    return 0 if located == len(chosen) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
