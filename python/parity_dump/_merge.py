"""One dump out of those of a tensor-parallel engine, a folder for each rank."""

import json
import pathlib
import struct

import numpy as np

from ._arrays import Array
from ._writer import MANIFEST, MATRICES, DumpError, Writer

_TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
# What ranks hold a slice of, by rows of the weight: heads, feed-forward columns, vocabulary.
_SLICED = ("q_proj", "k_proj", "v_proj", "q", "k", "v", "q_norm", "k_norm", "q_rope", "k_rope", "attn_ctx", "ffn_gate",
           "ffn_up", "ffn_act", "logits", *MATRICES)  # fmt: skip
# Fewer heads than ranks: neighbours hold the same one.
_SHARED = ("k_proj", "v_proj", "k", "v", "k_norm", "k_rope")
# What ranks hold a summand of, by columns of the weight.
_SUMMED = ("attn_out", "ffn_out", "ffn_moe_out")
WAYS = ("concat", "sum", "first")


def merge(ranks, path, ways=None):
    """Writes the dump of a whole model from those of its ranks, in order of rank, and returns its path.

    What is equal on all ranks is taken once. Of the rest, slices are laid side by side (`concat`) and summands added
    (`sum`), by their id. `ways` says so for ids that are not known, {"ffn_moe_out": "sum"}, by id or by what follows
    the layer; "first" takes rank 0's.
    """
    folders = [pathlib.Path(rank) for rank in ranks]
    manifests = [_manifest(folder) for folder in folders]
    if not folders:
        raise DumpError("no rank to merge: merge(['rank0', 'rank1'], 'out')")
    first = manifests[0]
    for folder, manifest in zip(folders, manifests):
        for key in ("tokens", "steps", "rows"):
            if manifest.get(key) != first.get(key):
                raise DumpError(f"{folder}: `{key}` is not that of {folders[0]}: the ranks ran another text or passes")
    producer = {k: first["producer"].get(k) for k in ("name", "version", "backend", "device")}
    numerics, notes = first["producer"].get("numerics"), dict(first.get("provenance") or {}, ranks=len(folders))
    with Writer(path, producer, numerics, first.get("model"), first.get("prompt"), notes) as dump:
        for step in first["steps"]:
            tensors = [read_tensors(folder / step["file"]) for folder in folders]
            for folder, own in zip(folders, tensors):
                if odd := sorted(set(own) ^ set(tensors[0])):
                    raise DumpError(f"{folder / step['file']}: {odd[0]} is not on all ranks")
            with dump.step([first["tokens"][p] for p in step["positions"]], step["positions"]):
                for name in tensors[0]:
                    listed = (first.get("rows") or {}).get(name)
                    rows = None if listed is None else [p for p in step["positions"] if p in set(listed)]
                    dump.tensor(name, _whole(name, [own[name] for own in tensors], ways or {}), rows)
    return dump.path


def _whole(name, parts, ways):
    kind = name.split(".")[-1]
    way = ways.get(name, ways.get(kind))
    if way is not None and way not in WAYS:
        raise DumpError(f"{name}: {way!r} is no way to merge: {', '.join(WAYS)}")
    equal = all(_equal(part, parts[0]) for part in parts)
    if way == "first" or way is None and equal:
        return parts[0]
    if way == "sum" or way is None and kind in _SUMMED:
        return Array(np.sum([values(part) for part in parts], axis=0, dtype=np.float32), "F32")
    if way == "concat" or kind in _SLICED:
        if kind in _SHARED:
            parts = [part for i, part in enumerate(parts) if i == 0 or not _equal(part, parts[i - 1])]
        axis = 0 if kind in MATRICES else 1
        return Array(np.concatenate([part.values for part in parts], axis=axis), parts[0].dtype)
    raise DumpError(f"{name} differs between ranks; hint: ways={{'{kind}': 'concat'}}, or 'sum', or 'first'")


def _equal(one, other):
    return one.dtype == other.dtype and np.array_equal(one.values.view(np.uint8), other.values.view(np.uint8))


def values(part):
    """The values of an array as f32."""
    if part.dtype == "BF16":
        return (part.values.astype(np.uint32) << 16).view(np.float32)
    return part.values.astype(np.float32)


def _manifest(folder):
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise DumpError(f"{folder}: expected a dump folder, found no readable {MANIFEST}: {error}") from error


def read_tensors(path):
    """{name: Array} of a safetensors file, in the order of the file."""
    data = np.memmap(path, np.uint8, "r")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] not in _TYPES:
            raise DumpError(f"{path}: {name} is {entry['dtype']}; a dump has F32, F16 and BF16")
        # A copy, so that unaligned data are no concern of the caller's.
        values = np.frombuffer(data[begin:end].tobytes(), _TYPES[entry["dtype"]]).reshape(entry["shape"])
        out[name] = Array(values, entry["dtype"])
    return out
