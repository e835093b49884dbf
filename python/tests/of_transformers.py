"""transformers' Qwen2 with forward hooks on every module, and the mistakes of mistakes.py."""

from importlib import metadata

import mistakes
import models
import torch

PRODUCER = f"transformers {metadata.version('transformers')}"
ARITHMETICS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
STATES, LOGITS = ("model.embed_tokens", "model.layers.{n}"), "lm_head"
# Mistakes of arithmetic are left out: of some a narrow engine makes as many as it likes.
MISTAKES = {name: (mistakes.checkpoint_of(place), names, change)
            for name, (place, names, change) in mistakes.MISTAKES.items() if name not in mistakes.USUAL["bf16"]}  # fmt: skip


def run(path, arithmetic, change, passes):
    """What each pass over token ids gives, {name: array of f32}, with the mistake that `change(model)` makes."""
    model, out, seen = models.from_gguf(path, ARITHMETICS[arithmetic], attn_implementation="eager"), [], {}

    def hook(name):
        def keep(_, __, result):
            result = result[0] if isinstance(result, tuple) else result
            if isinstance(result, torch.Tensor):
                seen[name] = result.float().numpy()

        return keep

    for name, module in model.named_modules():
        if name and not name.endswith(("rotary_emb", "act_fn")):
            module.register_forward_hook(hook(name))
    with torch.no_grad(), change(model):
        cache = None
        for ids in passes:
            seen.clear()
            cache = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values
            out.append({name: value.copy() for name, value in seen.items()})
    return out
