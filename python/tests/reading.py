"""Reads dumps back for the tests, by the format's description alone."""

import json
import pathlib
import struct

import numpy as np

TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "I32": np.dtype("<i4"),
         "I64": np.dtype("<i8")}  # fmt: skip


def manifest(path):
    return json.loads((pathlib.Path(path) / "manifest.json").read_text(encoding="utf-8"))


def tensors(path):
    """{name: (type, array)} of a safetensors file; bfloat16 as f32."""
    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    assert size % 8 == 0, "tensors are aligned"
    header = json.loads(data[8 : 8 + size])
    out, end = {}, 0
    for name, entry in header.items():
        begin, after = entry["data_offsets"]
        assert begin == end, "tensors lie one behind the other"
        end = after
        values = np.frombuffer(data[8 + size + begin : 8 + size + after], TYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        out[name] = (entry["dtype"], values.reshape(entry["shape"]))
    assert 8 + size + end == len(data), "nothing behind the tensors"
    return out


def steps(path):
    """[(positions, {name: (type, array)})]"""
    path = pathlib.Path(path)
    return [(step["positions"], tensors(path / step["file"])) for step in manifest(path)["steps"]]
