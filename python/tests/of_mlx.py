"""mlx-lm's Qwen2 with the weights of a GGUF file, hooked as anybody would hook it, and mistakes in its code."""

import contextlib
from importlib import metadata
from unittest import mock

import gguf
import known
import mlx.core as mx
import mlx.nn as nn
import models
import numpy as np
from gguf.quants import dequantize
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache

PRODUCER = f"mlx-lm {metadata.version('mlx-lm')}"
ARITHMETICS = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
STATES, LOGITS = ("model.embed_tokens", "model.layers.{n}"), "lm_head"
MISTAKES, mistake = known.registry()
PLAIN = qwen2.scaled_dot_product_attention


def load(path, arithmetic):
    reader = gguf.GGUFReader(path)
    number = {key: field.contents() for key, field in reader.fields.items() if key.startswith("qwen2.")}
    weights = {models._place(t.name): np.array(dequantize(t.data, t.tensor_type)).astype(np.float32) for t in reader.tensors}
    model = qwen2.Model(qwen2.ModelArgs(
        model_type="qwen2", hidden_size=number["qwen2.embedding_length"], num_hidden_layers=number["qwen2.block_count"],
        intermediate_size=number["qwen2.feed_forward_length"], num_attention_heads=number["qwen2.attention.head_count"],
        num_key_value_heads=number["qwen2.attention.head_count_kv"], rope_theta=number["qwen2.rope.freq_base"],
        rms_norm_eps=number["qwen2.attention.layer_norm_rms_epsilon"],
        vocab_size=weights["model.embed_tokens.weight"].shape[0], tie_word_embeddings="lm_head.weight" not in weights,
    ))  # fmt: skip
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    model.set_dtype(ARITHMETICS[arithmetic])
    return model


@contextlib.contextmanager
def hooks(model, seen):
    """Keeps what modules give, those that run once a pass; RoPE runs twice, on q and on k."""
    restored = []
    for name, module in model.named_modules():
        kind = type(module)
        if not name or isinstance(module, nn.RoPE):
            continue

        def call(self, *given, _name=name, _kind=kind, **options):
            out = _kind.__call__(self, *given, **options)
            seen[_name] = out
            return out

        restored.append((module, kind))
        module.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    try:
        yield
    finally:
        for module, kind in restored:
            module.__class__ = kind


def run(path, arithmetic, change, passes):
    """What each pass over token ids gives, {name: array of f32}, with the mistake that `change(model)` makes."""
    model, out = load(path, arithmetic), []
    with change(model):
        cache = make_prompt_cache(model)
        for ids in passes:
            seen = {}
            with hooks(model, seen):
                seen[LOGITS] = model(mx.array([ids]), cache=cache)
            out.append({name: np.array(value.astype(mx.float32)) for name, value in seen.items()})
    return out


def layer(model, index=1):
    return model.model.layers[index]


@contextlib.contextmanager
def one(module, change):
    """A module whose call is change(plain call, module, *arguments)."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__call__": lambda *g, **o: change(kind.__call__, *g, **o)})
    try:
        yield
    finally:
        module.__class__ = kind


def attention(change):
    """Attention with other arguments: change(queries, keys, values, mask, scale) -> those, a dictionary."""

    def attend(queries, keys, values, cache, scale, mask):
        given = dict(queries=queries, keys=keys, values=values, mask=mask, scale=scale)
        return PLAIN(**{**given, **change(**given)}, cache=cache)

    return mock.patch.object(qwen2, "scaled_dot_product_attention", attend)


def distance(queries, keys):
    """How far each key is behind each query, (L, S)."""
    length, seen = queries.shape[2], keys.shape[2]
    return mx.arange(seen - length, seen)[:, None] - mx.arange(seen)[None]


def ropes(change):
    """RoPE computed by change(plain call, module, x, offset)."""
    plain = nn.RoPE.__call__
    return mock.patch.object(nn.RoPE, "__call__", lambda *given, **options: change(plain, *given, **options))


@contextlib.contextmanager
def each_rope(model, **changes):
    for block in model.model.layers:
        for key, value in changes.items():
            setattr(block.self_attn.rope, key, value)
    yield


@mistake
def rope_pairs(model):
    with each_rope(model, traditional=True):
        yield


@mistake
def rope_backwards(model):
    with each_rope(model, scale=-1.0):
        yield


@mistake
def half_of_rope(model):
    with each_rope(model, dims=16):
        yield


@mistake
def positions_halved(model):
    with each_rope(model, scale=0.5):
        yield


@mistake
def positions_from_one(_):
    with ropes(lambda plain, rope, x, offset=0: plain(rope, x, offset + 1)):
        yield


@mistake
def decode_one_behind(_):
    with ropes(lambda plain, rope, x, offset=0: plain(rope, x, offset - (offset > 0))):
        yield


@mistake
def decode_from_zero(_):
    with ropes(lambda plain, rope, x, offset=0: plain(rope, x, 0)):
        yield


@mistake
def keys_without_rope(_):
    with ropes(lambda plain, rope, x, offset=0: x if x.shape[1] == 2 else plain(rope, x, offset)):
        yield


@mistake
def kv_heads_in_turn(_):
    with attention(lambda keys, values, **_: dict(keys=mx.tile(keys, (1, 4, 1, 1)), values=mx.tile(values, (1, 4, 1, 1)))):
        yield


@mistake
def first_kv_head(_):
    with attention(lambda keys, values, **_: dict(keys=keys[:, :1], values=values[:, :1])):
        yield


@mistake
def heads_in_reverse(_):
    with mock.patch.object(qwen2, "scaled_dot_product_attention", lambda *given, **options: PLAIN(*given, **options)[:, ::-1]):
        yield


@mistake
def no_scale(_):
    with attention(lambda **_: dict(scale=1.0)):
        yield


@mistake
def scale_of_the_width(_):
    with attention(lambda **_: dict(scale=256**-0.5)):
        yield


@mistake
def no_mask(_):
    with attention(lambda **_: dict(mask=None)):
        yield


@mistake
def one_further_seen(_):
    with attention(lambda queries, keys, **_: dict(mask=distance(queries, keys) >= -1)):
        yield


@mistake
def window_of_four(_):
    def window(queries, keys, **_):
        behind = distance(queries, keys)
        return dict(mask=(behind >= 0) & (behind < 4))

    with attention(window):
        yield


@mistake
def soft_cap(_):
    def attend(queries, keys, values, cache, scale, mask):
        keys, values = (mx.repeat(x, 4, axis=1) for x in (keys, values))
        scores = 5 * mx.tanh((queries * scale) @ keys.swapaxes(2, 3) / 5)
        scores = mx.where(distance(queries, keys) >= 0, scores, -mx.inf)
        return mx.softmax(scores, axis=-1, precise=True).astype(values.dtype) @ values

    with mock.patch.object(qwen2, "scaled_dot_product_attention", attend):
        yield


@mistake
def own_position_not_seen_in_decoding(_):
    def older(queries, keys, values, **_):
        return dict(keys=keys[:, :, :-1], values=values[:, :, :-1]) if queries.shape[2] == 1 else {}

    with attention(older):
        yield


@mistake
def layer_norm(model):
    with one(layer(model).input_layernorm, lambda plain, norm, x: plain(norm, x - x.mean(-1, keepdims=True))):
        yield


@mistake
def gelu(_):
    with mock.patch.object(qwen2, "swiglu", lambda gate, up: nn.gelu(gate) * up):
        yield


@mistake
def activation_on_up(model):
    with one(layer(model).mlp, lambda _, mlp, x: mlp.down_proj(qwen2.swiglu(mlp.up_proj(x), mlp.gate_proj(x)))):
        yield


def block(model, change):
    """Layer 1 computed by change(its input, attention of it as a function, itself)."""

    def call(_, one_block, x, mask=None, cache=None):
        return change(x, lambda y: one_block.self_attn(y, mask, cache), one_block)

    return one(layer(model), call)


@mistake
def residual_left_out(model):
    def without(x, attend, of):
        h = attend(of.input_layernorm(x))
        return h + of.mlp(of.post_attention_layernorm(h))

    with block(model, without):
        yield


@mistake
def residual_of_the_norm(model):
    def normed(x, attend, of):
        n = of.input_layernorm(x)
        h = n + attend(n)
        return h + of.mlp(of.post_attention_layernorm(h))

    with block(model, normed):
        yield


@mistake
def parallel_residual(model):
    with block(model, lambda x, attend, of: x + attend(of.input_layernorm(x)) + of.mlp(of.post_attention_layernorm(x))):
        yield


@mistake
def layer_skipped(model):
    with one(layer(model, 2), lambda _, __, x, *___, **____: x):
        yield


@mistake
def scaled_embedding(model):
    with one(model.model.embed_tokens, lambda plain, embed, ids: plain(embed, ids) * 16):
        yield


@mistake
def logits_scaled(model):
    with one(model, lambda plain, *given, **options: plain(*given, **options) * 0.5):
        yield


@mistake
def logits_without_the_norm(model):
    """The norm runs, and its result is not read."""
    table, held = model.model.embed_tokens, {}

    def norm(plain, module, x):
        held["x"] = x
        return plain(module, x)

    kind = type(table)
    with one(model.model.norm, norm):
        table.__class__ = type(kind.__name__, (kind,), {"as_linear": lambda self, _: kind.as_linear(self, held["x"])})
        yield
