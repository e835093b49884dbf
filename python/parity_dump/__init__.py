"""Hands an engine's tensors to parity: see docs/dumps.md for the ids and shapes.

    parity_dump.save({"embed": h0, "blk.0.attn_norm": n0, …}, "out", tokens=ids)

    with parity_dump.capture(model, "out"):      # any transformers causal language model
        model.generate(**inputs, max_new_tokens=8)

    with parity_dump.Writer("out", producer="my-engine") as dump:
        with dump.step(tokens):
            dump.tensor("embed", h0)

Arrays are numpy arrays, torch tensors on any device, or anything with `__array__`. Only numpy is needed.
"""

from ._arrays import Bf16
from ._save import save
from ._writer import DumpError, Writer

__all__ = ["Bf16", "DumpError", "Writer", "capture", "save"]
__version__ = "0.1.0"


def capture(model, path, **options):
    """Records every forward pass of a transformers model: see `parity_dump.capturing.Capture`."""
    from .capturing import Capture

    return Capture(model, path, **options)
