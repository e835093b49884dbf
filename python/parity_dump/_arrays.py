"""Arrays of any library as little-endian bytes with a safetensors type."""

import numpy as np

_PLAIN = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
_INTEGERS = "iub"


class Bf16:
    """bfloat16 values as the upper halves of their f32: `bits` is a uint16 array of any shape."""

    def __init__(self, bits):
        self.bits = np.asarray(bits)
        if self.bits.dtype != np.uint16:
            raise TypeError(f"bfloat16 values are given as uint16 bits, not as {self.bits.dtype}")

    shape = property(lambda self: self.bits.shape)


class Array:
    """A tensor on the host: `values` is a numpy array, of bits where `dtype` is BF16."""

    def __init__(self, values, dtype):
        self.values, self.dtype = values, dtype

    shape = property(lambda self: self.values.shape)
    ndim = property(lambda self: self.values.ndim)

    def map(self, change):
        """The same type, with `change` made to the values: views, slices, transposes."""
        return Array(change(self.values), self.dtype)

    def bytes(self):
        """A buffer of the values in C order."""
        values = np.ascontiguousarray(self.values)
        if values.dtype.byteorder == ">" or (values.dtype.byteorder == "=" and not np.little_endian):
            values = values.astype(values.dtype.newbyteorder("<"))
        return memoryview(values.reshape(-1)).cast("B")


def array(value, name="tensor"):
    """`value` as an `Array`. f64 and integers become F32, which parity judges by; nothing else is converted."""
    if isinstance(value, Array):
        return value
    if isinstance(value, Bf16):
        return Array(value.bits, "BF16")
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return _from_torch(value)
    values = _asarray(value, name)
    if values.dtype.name == "bfloat16":  # the package ml_dtypes, as jax has it
        return Array(values.view(np.uint16), "BF16")
    native = values.dtype.newbyteorder("=")
    if native in _PLAIN:
        return Array(values, _PLAIN[native])
    if native == np.float64 or native.kind in _INTEGERS:
        return Array(values.astype(np.float32), "F32")
    raise TypeError(f"{name} has the element type {values.dtype}; a dump has float32, float16 and bfloat16")


def _asarray(value, name):
    try:
        return np.asarray(value)
    except ValueError:  # numpy's own words are of sequences and inhomogeneous shapes
        expected = "expected an array, or nested lists of one length on each axis"
        raise TypeError(f"{name}: {expected}; found lists of several") from None


def _from_torch(tensor):
    import torch

    if hasattr(tensor, "full_tensor"):  # a DTensor: the whole of what is spread over devices
        tensor = tensor.full_tensor()
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits = tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
        return Array(bits, "BF16")
    if tensor.dtype not in (torch.float32, torch.float16):
        tensor = tensor.to(torch.float32)
    values = tensor.cpu().numpy()
    return Array(values, _PLAIN[values.dtype])


def integers(value):
    """A flat list of the integers in `value`: a list, an array or a tensor."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu().numpy()
    values = _asarray(value, "token ids and positions")
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"token ids and positions are integers, not {values.dtype}")
    values = values.reshape(-1).tolist()
    if any(v < 0 for v in values):
        raise ValueError(f"token ids and positions are not negative: {min(values)}")
    return values
