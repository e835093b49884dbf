"""Records the forward passes of a transformers causal language model through hooks, one step a pass."""

import fnmatch
import functools
import inspect
import pathlib

import torch

from .._writer import DumpError, Writer
from . import declared, structure


class Capture:
    """A context in which every forward pass of `model` becomes a step of the dump in `path`.

    A prefill, decode steps of `generate`, chunks: each pass is one step, and a row is a position of the text
    whatever pass computed it. Tensors go to the file one by one, from whatever device they are on. Nothing that
    the model computes is changed.

    `prompt` is kept in the manifest. `only` lists patterns of ids, ["embed", "blk.0.*"]: all by default.
    `attention_probs` records `attn_probs` as well, where attention is eager. `sequence` is the row of the batch
    that is recorded, where there is more than one; its padding is left out. `tokens` (T,) are the token ids of a
    model that is called with embeddings. `qk_order` is "gguf" or "hf": the order of the rows of q and k, by default
    that of the GGUF file, whose conversion reorders them for models of the Llama family. `all_logits` asks the model
    for the logits of every position where `generate` would ask for the last one's; False leaves it at that.

    After the context, `ids` is the set of what was recorded, and `missing` lists what the model did not expose.
    """

    def __init__(self, model, path, *, prompt=None, only=None, attention_probs=False, sequence=None, tokens=None,
                 qk_order="gguf", all_logits=True):  # fmt: skip
        if qk_order not in ("gguf", "hf"):
            raise DumpError(f"qk_order is 'gguf' or 'hf', not {qk_order!r}")
        self.model, self.path = model, pathlib.Path(path)
        self.causal, self.base = structure.decoder(model)
        config = self.causal.config
        self.config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.reorder = qk_order == "gguf" and self.config.model_type in structure.REORDERED
        self.prompt, self.only, self.attention_probs, self.sequence = prompt, only, attention_probs, sequence
        self.given_tokens, self.all_logits = tokens, all_logits
        self.ids, self.missing = set(), []
        self.dump = self.keep = self.current = None
        self._undo = []

    # --- the context ---

    def __enter__(self):
        kind = self.config.model_type
        name = str(getattr(self.config, "_name_or_path", "") or "") or type(self.causal).__name__
        model = {"architecture": structure.ARCHITECTURES.get(kind, kind), "name": name}  # fmt: skip
        notes = {"q and k rows": "reordered as in GGUF"} if self.reorder else {}
        self.dump = Writer(self.path, declared.producer(self.causal), model=model, prompt=self.prompt, provenance=notes)
        try:
            self._hook_all()
        except BaseException:
            self._unhook()
            raise
        return self

    def __exit__(self, kind, error, trace):
        self._unhook()
        self.dump.discard_step()  # one that an exception in the model left open
        self.dump.__exit__(kind, error, trace)
        if kind is None and not self.ids:
            raise DumpError(f"{self.path}: no forward pass of {type(self.causal).__name__} was seen within the context")
        self.missing = sorted(self._expected() - self.ids) if self.only is None else []

    def _unhook(self):
        while self._undo:
            self._undo.pop()()

    def _expected(self):
        kinds = ("attn_norm", "q", "k", "v", "q_rope", "k_rope", "attn_ctx", "attn_out", "attn_residual", "ffn_norm", "layer_out")
        of_layers = {
            f"blk.{n}.{structure.own_names(layer, self.config.model_type).get(kind, kind)}"
            for n, layer in structure.layers(self.base)
            for kind in kinds
        }
        return of_layers | {"embed", "final_norm", "logits"}

    # --- hooks ---

    def _hook(self, module, when, handler):
        """Calls handler(tensor, arguments) on the first argument, or what the module gives, while a step is open."""

        def before(_, args, kwargs):
            value = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
            if self.keep is not None and value is not None:
                handler(value, value)

        def after(_, args, kwargs, output):
            if self.keep is not None:
                source = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
                handler(output, source)

        handle = (
            module.register_forward_pre_hook(before, with_kwargs=True)
            if when == "in"
            else module.register_forward_hook(after, with_kwargs=True)
        )
        self._undo.append(handle.remove)

    def _plain(self, id):
        return lambda value, _: self._record(id, self._rows(value[0] if isinstance(value, tuple) else value))

    def _hook_all(self):
        begin = self.causal.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        end = self.causal.register_forward_hook(self._end, with_kwargs=True, always_call=False)
        self._undo += [begin.remove, end.remove]
        self._hook_embedding()
        for index, layer in structure.layers(self.base):
            for module, when, name in structure.in_and_out(layer, self.config.model_type):
                self._hook(module, when, self._plain(f"blk.{index}.{name}"))
            self._hook_attention(index, structure.attention(layer))
            block = structure.block(layer)
            self._hook_gate_up(index, block)
            if structure.is_moe(block):
                self._hook_router(index, block)
        norm = structure.final_norm(self.base)
        if norm is not None:
            self._hook(norm, "out", self._plain("final_norm"))

    def _hook_embedding(self):
        module = structure.embedding(self.base)
        if type(module).forward is torch.nn.Embedding.forward:
            return self._hook(module, "out", self._plain("embed"))
        # An embedding that scales its rows (Gemma): the rows as they are in the table, and what it makes of them.
        self._hook(module, "out", self._plain("inp_scaled"))
        plain = torch.nn.Embedding.forward

        @functools.wraps(plain)
        def forward(this, *args, **kwargs):
            rows = plain(this, *args, **kwargs)
            if this is module and self.keep is not None:
                self._record("embed", self._rows(rows))
            return rows

        torch.nn.Embedding.forward = forward
        self._undo.append(lambda: setattr(torch.nn.Embedding, "forward", plain))

    def _hook_attention(self, index, attn):
        query, shared, width = structure.heads(attn, self.config)

        def entered(module, args, kwargs):
            self.current = index

        self._undo.append(attn.register_forward_pre_hook(entered, with_kwargs=True).remove)
        for name, count in (("q", query), ("k", shared), ("v", shared)):
            if (module := structure.first(attn, (f"{name}_proj", f"w{name}"))) is not None:
                biased = getattr(module, "bias", None) is not None
                self._hook(module, "out", functools.partial(self._projection, index, name, count, width, biased))
            if (module := structure.first(attn, (f"{name}_norm", f"{name}_layernorm"))) is not None:
                self._hook(module, "out", functools.partial(self._head_norm, index, name, count, width))
        if (module := structure.first(attn, ("qkv_proj",))) is not None:
            biased = getattr(module, "bias", None) is not None
            self._hook(module, "out", functools.partial(self._fused, index, query, shared, width, biased))
        if self.attention_probs:
            self._hook(attn, "out", functools.partial(self._probs, index))
        # Decorators of `forward` (transformers 4) have other globals than the function that calls RoPE.
        self._wrap_rope(inspect.unwrap(type(attn).forward).__globals__)

    def _wrap_rope(self, names):
        plain = names.get("apply_rotary_pos_emb")
        if plain is None or hasattr(plain, "parity_dump"):
            return

        signature = inspect.signature(plain)

        def rope(*args, **kwargs):
            out = plain(*args, **kwargs)
            if self.keep is not None and self.current is not None and isinstance(out, tuple):
                # The axis that cos and sin are repeated along is the heads'.
                heads_axis = signature.bind(*args, **kwargs).arguments.get("unsqueeze_dim", 1)
                for name, value in zip("qk", out):
                    value = value.transpose(1, 2) if heads_axis == 1 else value
                    self._record_rows(f"blk.{self.current}.{name}_rope", value, name)
            return out

        rope.parity_dump = True
        names["apply_rotary_pos_emb"] = rope
        self._undo.append(lambda: names.__setitem__("apply_rotary_pos_emb", plain))

    def _hook_gate_up(self, index, block):
        module = structure.first(block, ("gate_up_proj",)) if not structure.is_moe(block) else None
        if isinstance(module, torch.nn.Module):

            def handler(value, _):
                for name, half in zip(("ffn_gate", "ffn_up"), value.chunk(2, dim=-1)):
                    self._record(f"blk.{index}.{name}", self._rows(half))

            self._hook(module, "out", handler)

    def _hook_router(self, index, block):
        module, logits, weights = structure.router(block)
        if module is None:
            return

        def handler(value, _):
            # Logits alone, or with the weights and numbers of the chosen experts. Two tensors are something else: what
            # transformers 4 gives for gpt-oss has the weights where others have the logits.
            parts = value if isinstance(value, tuple) else (value,)
            for name, part in zip((logits, weights, "ffn_moe_topk"), parts if len(parts) != 2 else ()):
                self._record(f"blk.{index}.{name}", self._rows(part.reshape(*self.shape, part.shape[-1])))

        self._hook(module, "out", handler)

    # --- what becomes of a tensor ---

    def _rows(self, value):
        """(B, T, …) -> (rows, …) of the sequence that is recorded, without its padding."""
        if value.dim() == 2 and self.shape[0] * self.shape[1] == value.shape[0]:
            value = value.reshape(*self.shape, -1)
        value = value[self.index]
        return value if self.keep is True else value[self.keep.to(value.device)]

    def _record(self, id, value, rows=None):
        if self.only is not None and not any(fnmatch.fnmatchcase(id, pattern) for pattern in self.only):
            return
        self.dump.tensor(id, value, rows)
        self.ids.add(id)

    def _projection(self, index, name, count, width, biased, value, _):
        """(B, T, H·E) as `q`, and as `q_proj` too where no bias is added: with one, the matmul is not exposed."""
        value = value.unflatten(-1, (count, width))
        self._record_rows(f"blk.{index}.{name}", value, name)
        if not biased:
            self._record_rows(f"blk.{index}.{name}_proj", value, name, flat=True)

    def _fused(self, index, query, shared, width, biased, value, _):
        parts = value.split([query * width, shared * width, shared * width], dim=-1)
        for name, count, part in zip("qkv", (query, shared, shared), parts):
            self._projection(index, name, count, width, biased, part, None)

    def _head_norm(self, index, name, count, width, value, source):
        if value.dim() == 3:  # one norm over all heads (OLMo 2)
            value = value.unflatten(-1, (count, width))
        elif source is not None and source.stride(1) < source.stride(2):
            value = value.transpose(1, 2)  # of a view whose heads come first (Gemma 3): they lie closest
        self._record_rows(f"blk.{index}.{name}_norm", value, name)

    def _record_rows(self, id, value, name, flat=False):
        rows = self._rows(value)
        if self.reorder and name in "qk":
            heads, width = rows.shape[-2:]
            rows = rows.unflatten(-1, (2, width // 2)).transpose(-1, -2).reshape(-1, heads, width)
        self._record(id, rows.flatten(1) if flat else rows)

    def _probs(self, index, value, _):
        probs = value[1] if isinstance(value, tuple) and len(value) > 1 else None
        if probs is None:
            raise DumpError(
                "attention_probs needs eager attention, found "
                f"{declared.attention(self.config)!r}; hint: from_pretrained(…, attn_implementation='eager')"
            )
        last = self.positions[-1] + 1
        if self.keep is True and probs.shape[-1] == last:
            self._record(f"blk.{index}.attn_probs", probs[self.index])

    # --- steps ---

    def _begin(self, _, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        shape = ids if ids is not None else kwargs.get("inputs_embeds")
        if shape is None or shape.dim() < 2:
            raise DumpError("a forward pass without input_ids (B, T) cannot be recorded")
        self.shape, self.index = tuple(shape.shape[:2]), self.sequence or 0
        if self.shape[0] > 1 and self.sequence is None:
            raise DumpError(f"a batch of {self.shape[0]} texts; hint: capture(model, path, sequence=0) records the first")
        past = _cached(kwargs.get("past_key_values", kwargs.get("cache")))  # since transformers 5.24
        self.keep, first = self._padding(kwargs.get("attention_mask"), past)
        count = self.shape[1] if self.keep is True else int(self.keep.sum())
        known = self.dump.manifest["tokens"]
        if first > len(known):
            raise DumpError(
                f"the cache holds {first} positions, of which {len(known)} were recorded; "
                "hint: start the capture before the prefill"
            )
        self.positions = list(range(first, first + count))
        tokens = self._tokens(ids)
        if any(known[p] != t for p, t in zip(self.positions, tokens) if p < len(known)) and first == 0:
            raise DumpError("a second text began within one capture; hint: one `with capture(…)` for each text")
        if not self.dump.manifest["steps"]:
            device = declared.device(self.causal, shape.device)
            self.dump.manifest["producer"]["numerics"] = declared.numerics(self.causal, self.config, device)
            self.dump.manifest["provenance"].update(declared.provenance(self.causal, self.config, device))
        self.dump.discard_step()
        self.dump.begin_step(tokens, self.positions)
        if self.all_logits and "logits_to_keep" in kwargs:
            kwargs = kwargs | {"logits_to_keep": 0}
        self.kept_logits = kwargs.get("logits_to_keep")
        return args, kwargs

    def _padding(self, mask, past):
        """Which of the T columns are tokens (True for all), and the position of the first of them."""
        length = self.shape[1]
        if mask is None or not torch.is_tensor(mask) or mask.dim() != 2 or bool(mask[self.index].bool().all()):
            return True, past
        row = mask[self.index].bool().cpu()
        keep = row[-length:]
        return (True if bool(keep.all()) else keep), int(row[: row.shape[0] - length].sum())

    def _tokens(self, ids):
        if ids is not None:
            row = ids[self.index]
            return (row if self.keep is True else row[self.keep.to(row.device)]).tolist()
        if self.given_tokens is None or len(self.given_tokens) <= self.positions[-1]:
            raise DumpError("the model is called with embeddings; hint: capture(model, path, tokens=[…]) says of which tokens")
        return [int(self.given_tokens[p]) for p in self.positions]

    def _end(self, _, args, kwargs, output):
        logits = getattr(output, "logits", None)
        if logits is not None and logits.dim() == 3:
            columns = torch.arange(self.shape[1])
            kept = self.kept_logits
            if torch.is_tensor(kept) and kept.dim():
                columns = columns[kept.cpu()]
            columns = columns[-logits.shape[1] :]
            real = torch.ones(self.shape[1], dtype=torch.bool) if self.keep is True else self.keep
            places = torch.cumsum(real, 0) - 1
            chosen = real[columns]
            rows = [self.positions[int(places[c])] for c in columns[chosen]]
            if rows:
                self._record("logits", logits[self.index][chosen.to(logits.device)], rows)
        self.dump.end_step()
        self.keep = self.current = None


def _cached(cache):
    """The number of positions in a cache of any kind."""
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    return int(cache[0][0].shape[-2]) if len(cache) else 0
