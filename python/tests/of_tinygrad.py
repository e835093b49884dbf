"""tinygrad's own loader of GGUF files and its transformer, hooked as anybody would hook it, and mistakes in its code."""

import contextlib
import sys
import types
from importlib import metadata
from unittest import mock

import known
import numpy as np
from tinygrad import Tensor, UOp, dtypes, nn

try:
    from tinygrad.llm import model as code
except ModuleNotFoundError:  # the package of 0.14.0 lacks tinygrad.llm.kernels, which are for AMD's GPUs
    lacking = types.ModuleType("tinygrad.llm.kernels.amd")
    lacking.Linear, lacking.gated_delta_prefill, lacking.flash_attention = nn.Linear, None, None
    lacking.amd_custom_kernels_supported = lambda _: False
    sys.modules["tinygrad.llm.kernels"] = types.ModuleType("tinygrad.llm.kernels")
    sys.modules["tinygrad.llm.kernels.amd"] = lacking
    from tinygrad.llm import model as code

PRODUCER = f"tinygrad {metadata.version('tinygrad')}"
# f32: HALF=0. half-weights: as it comes, norm weights and biases in f16 too. f16: activations besides, cast back behind RoPE,
# whose table in f32 would make all that follows f32.
ARITHMETICS = {"f32": (0, dtypes.float), "half-weights": (1, dtypes.float), "f16": (1, dtypes.half)}
STATES, LOGITS = ("token_embd", "blk.{n}"), "output"
CONTEXT = 32
MISTAKES, mistake = known.registry()
ROPE, ATTEND, LINEAR = code.apply_rope, Tensor.scaled_dot_product_attention, code.Linear


def modules(model):
    """(name, module) of a model: those that have weights, and the layers."""
    for name in ("token_embd", "output_norm", "output"):
        yield name, getattr(model, name)
    for index, block in enumerate(model.blk):
        yield f"blk.{index}", block
        for name, value in vars(block).items():
            if isinstance(value, (LINEAR, nn.RMSNorm)):
                yield f"blk.{index}.{name}", value


@contextlib.contextmanager
def hooks(model, seen):
    names = {id(module): name for name, module in modules(model)}
    with contextlib.ExitStack() as stack:
        for kind in {type(module) for _, module in modules(model)}:

            def call(self, *given, _plain=kind.__call__, **options):
                out = _plain(self, *given, **options)
                if id(self) in names:
                    seen[names[id(self)]] = out
                return out

            stack.enter_context(mock.patch.object(kind, "__call__", call))
        yield


def run(path, arithmetic, change, passes):
    """What each pass over token ids gives, {name: array of f32}, with the mistake that `change(model)` makes.

    Layers are run without being compiled as a function, whose inside no hook sees, and the head for all rows.
    """
    half, kind = ARITHMETICS[arithmetic]
    plain = code.getenv
    with mock.patch.object(code, "getenv", lambda key, default=0: half if key == "HALF" else plain(key, default)):
        model, _ = code.Transformer.from_gguf(str(path), CONTEXT)
    out, done, at = [], 0, UOp.variable("start_pos", 0, CONTEXT - 1)
    as_it_is = mock.patch.object(code, "function", lambda **_: lambda function: function)
    with as_it_is, change(model), rope(lambda x, table, turned=code.apply_rope: turned(x, table).cast(x.dtype)):
        for ids in passes:
            seen = {}
            with hooks(model, seen):
                x = model.token_embd(Tensor([ids], dtype="int32")).cast(kind)
                start = at.bind(done) if done else 0
                for block in model.blk:
                    x = block(x, start)
                seen["output"] = model.output(model.output_norm(x))
            Tensor.realize(*seen.values())
            out.append({name: value.float().numpy().astype(np.float32) for name, value in seen.items()})
            done += len(ids)
    return out


def rope(change):
    """RoPE computed by change(x, table of frequencies (T, E)) -> x; heads are (B, H, T, E)."""
    return mock.patch.object(code, "apply_rope", change)


class Shifted:
    """A table of frequencies that is read at other positions: where(first position of the step) -> that."""

    def __init__(self, table, where):
        self.table, self.where = table, where

    def __getitem__(self, rows):
        length = rows.stop - rows.start
        first = self.where(rows.start)
        return self.table[first : first + (length if isinstance(length, int) else length.simplify())]


def positions(where):
    plain = code.TransformerBlock._init_state

    def init(self, x):
        had = hasattr(self, "cache_kv")
        plain(self, x)
        if not had:
            self.freqs_cis = Shifted(self.freqs_cis, where)

    return mock.patch.object(code.TransformerBlock, "_init_state", init)


def attention(change):
    """Attention with other arguments: change(q, k, v, mask) -> (q, k, v, mask), with as many heads of k as of q or fewer."""

    def attend(self, key, value, attn_mask=None, **options):
        q, k, v, mask = change(self, key, value, attn_mask)
        return ATTEND(q, k, v, attn_mask=mask, **options)

    return mock.patch.object(Tensor, "scaled_dot_product_attention", attend)


def masked(seen):
    """A mask of those keys that seen(distance of a key behind a query (T, S)) lets through."""

    def change(q, k, v, _):
        length, total = q.shape[2], k.shape[2]
        first = total - length
        behind = Tensor.arange(length).reshape(length, 1) + first - Tensor.arange(CONTEXT)[:total].reshape(1, total)
        return q, k, v, seen(behind).where(0.0, float("-inf")).reshape(1, 1, length, total)

    return attention(change)


def method(kind, name, change):
    """A class whose method is change(plain method, self, *arguments)."""
    plain = getattr(kind, name)
    return mock.patch.object(kind, name, lambda *given, **options: change(plain, *given, **options))


def block(index, change):
    """A layer computed by change(its input, attention of it as a function, itself)."""

    def call(plain, self, x, start):
        self._init_state(x)
        return change(x, lambda y: self._attention(y, start), self) if self is chosen[0] else plain(self, x, start)

    chosen = [None]

    @contextlib.contextmanager
    def of(model):
        chosen[0] = model.blk[index]
        with method(code.FFNBlock, "__call__", call):
            yield

    return of


@mistake
def rope_pairs(_):
    def turn(x, table):
        cos, sin = table.reshape(1, 1, x.shape[2], -1).chunk(2, dim=-1)
        a, b = x[..., ::2], x[..., 1::2]
        return Tensor.stack(a * cos - b * sin, b * cos + a * sin, dim=-1).flatten(-2)

    with rope(turn):
        yield


@mistake
def rope_backwards(_):
    with rope(lambda x, table: ROPE(x, table[..., :16].cat(-table[..., 16:], dim=-1))):
        yield


@mistake
def half_of_rope(_):
    def part(x, table):
        return ROPE(x[..., :16], table[..., :16:2].cat(table[..., 16::2], dim=-1)).cat(x[..., 16:], dim=-1)

    with rope(part):
        yield


@mistake
def positions_from_one(_):
    with positions(lambda first: first + 1):
        yield


@mistake
def decode_one_behind(_):
    with positions(lambda first: first - 1 if isinstance(first, UOp) else first):
        yield


@mistake
def decode_from_zero(_):
    with positions(lambda _: 0):
        yield


@mistake
def keys_without_rope(_):
    with rope(lambda x, table: x if x.shape[1] == 2 else ROPE(x, table)):
        yield


@mistake
def kv_heads_in_turn(_):
    with attention(lambda q, k, v, mask: (q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1), mask)):
        yield


@mistake
def first_kv_head(_):
    with attention(lambda q, k, v, mask: (q, k[:, :1], v[:, :1], mask)):
        yield


@mistake
def heads_in_reverse(_):
    with method(Tensor, "scaled_dot_product_attention", lambda plain, *given, **options: plain(*given, **options).flip(1)):
        yield


@mistake
def no_scale(_):
    with attention(lambda q, k, v, mask: (q * 32**0.5, k, v, mask)):
        yield


@mistake
def scale_of_the_width(_):
    with attention(lambda q, k, v, mask: (q * (32 / 256) ** 0.5, k, v, mask)):
        yield


@mistake
def no_mask(_):
    with attention(lambda q, k, v, _: (q, k, v, None)):
        yield


@mistake
def one_further_seen(_):
    with masked(lambda behind: behind >= -1):
        yield


@mistake
def window_of_four(_):
    with masked(lambda behind: (behind >= 0) & (behind < 4)):
        yield


@mistake
def soft_cap(_):
    def attend(self, key, value, attn_mask=None, **_):
        key, value = (x.repeat_interleave(4, dim=1) for x in (key, value))
        scores = 5 * ((self.float() @ key.float().transpose(2, 3)) / (5 * 32**0.5)).tanh()
        return (scores if attn_mask is None else scores + attn_mask).cast(self.dtype).softmax(-1) @ value

    with mock.patch.object(Tensor, "scaled_dot_product_attention", attend):
        yield


@mistake
def layer_norm(model):
    norm = model.blk[1].attn_norm
    with method(nn.RMSNorm, "_norm", lambda plain, self, x: plain(self, x - x.mean(-1, keepdim=True) if self is norm else x)):
        yield


@mistake
def gelu(_):
    with mock.patch.object(Tensor, "silu", Tensor.gelu):
        yield


@mistake
def activation_on_up(model):
    def swapped(plain, self, x):
        return self.ffn_down(self.ffn_gate(x) * self.ffn_up(x).silu()) if self is model.blk[1] else plain(self, x)

    with method(code.FFNBlock, "_feed_forward", swapped):
        yield


@mistake
def residual_left_out(model):
    def without(x, attend, of):
        h = attend(of.attn_norm(x))
        return h + of._feed_forward(of.ffn_norm(h))

    with block(1, without)(model):
        yield


@mistake
def residual_of_the_norm(model):
    def normed(x, attend, of):
        n = of.attn_norm(x)
        h = n + attend(n)
        return h + of._feed_forward(of.ffn_norm(h))

    with block(1, normed)(model):
        yield


@mistake
def parallel_residual(model):
    with block(1, lambda x, attend, of: x + attend(of.attn_norm(x)) + of._feed_forward(of.ffn_norm(x)))(model):
        yield


@mistake
def layer_skipped(model):
    with block(2, lambda x, _, __: x.contiguous())(model):
        yield


@mistake
def scaled_embedding(_):
    with method(nn.Embedding, "__call__", lambda plain, self, ids: plain(self, ids) * 16):
        yield


@mistake
def logits_scaled(model):
    with method(LINEAR, "__call__", lambda plain, self, x: plain(self, x) * (0.5 if self is model.output else 1)):
        yield


@mistake
def logits_without_the_norm(model):
    """The norm runs, and its result is not read."""
    held = {}

    def norm(plain, self, x):
        if self is model.output_norm:
            held["x"] = x
        return plain(self, x)

    with method(nn.RMSNorm, "__call__", norm):
        with method(LINEAR, "__call__", lambda plain, self, x: plain(self, held["x"] if self is model.output else x)):
            yield
