#!/usr/bin/env python3
"""Compares parity's decoding of GGUF tensors with that of the Python package `gguf`, bit for bit.

    pip install gguf numpy
    cargo build --release
    scripts/check-dequant.py MODEL.gguf…              every tensor of every file
    scripts/check-dequant.py                          tests/data/dequant-blocks.gguf
    scripts/check-dequant.py --write-blocks FILE      makes that file: random blocks of every type,
                                                      and their values as the package decodes them

Exit code 0: all values are equal (NaN for NaN), 1: some are not, 2: nothing was compared.
"""

import argparse
import collections
import pathlib
import subprocess
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCKS = ROOT / "tests" / "data" / "dequant-blocks.gguf"
TYPES = [
    Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0,
    Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS,
]  # fmt: skip
ROWS, COLS = 2, 256
SEED = 20260101


def expected(data, dtype):
    """(…) f32, flat, of stored blocks."""
    with np.errstate(all="ignore"):
        if dtype == Type.BF16:
            # The package's own conversion, but for arrays of any type.
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).ravel()
        return np.asarray(dequantize(data, dtype)).astype(np.float32).ravel()


def write_blocks(path):
    """Random bytes are valid blocks of every type: scales of all sizes and signs, NaN and infinities too."""
    random = np.random.default_rng(SEED)
    writer = gguf.GGUFWriter(path, "dequant-blocks")
    for dtype in TYPES:
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[dtype]
        data = random.integers(0, 256, (ROWS, COLS // block_len * block_bytes), dtype=np.uint8)
        plain = {Type.F32: np.float32, Type.F16: np.float16}.get(dtype)
        values = expected(data.view(plain) if plain else data, dtype)
        writer.add_tensor(dtype.name, data, raw_dtype=dtype)
        writer.add_tensor(dtype.name + ".f32", values.reshape(ROWS, COLS))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(parity, path):
    """Compares one file. Returns tensors and values by type, and the names of those that differ."""
    counts, values, wrong = collections.Counter(), collections.Counter(), []
    for tensor in gguf.GGUFReader(path).tensors:
        command = [parity, "inspect", path, "--raw-f32", tensor.name]
        found = np.frombuffer(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout, np.float32)
        want = expected(tensor.data, tensor.tensor_type)
        if found.size != want.size:
            wrong.append(f"{tensor.name}: {want.size} values expected, {found.size} found")
            continue
        same = (found.view(np.uint32) == want.view(np.uint32)) | (np.isnan(found) & np.isnan(want))
        counts[tensor.tensor_type.name] += 1
        values[tensor.tensor_type.name] += want.size
        if not same.all():
            at = int(np.argmin(same))
            wrong.append(
                f"{tensor.name} ({tensor.tensor_type.name}): {np.count_nonzero(~same)} of {want.size} values"
                f" differ, first [{at}]: expected {want[at]!r}, found {found[at]!r}"
            )
    return counts, values, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=[str(BLOCKS)], metavar="MODEL.gguf")
    parser.add_argument("--parity", default=str(ROOT / "target" / "release" / "parity"), help="the program to check")
    parser.add_argument("--write-blocks", metavar="FILE", help="make the file of random blocks and end")
    options = parser.parse_args()
    if options.write_blocks:
        write_blocks(options.write_blocks)
        return 0
    compared, wrong = 0, []
    for path in options.files:
        counts, values, wrong_here = check(options.parity, path)
        compared += sum(values.values())
        wrong += wrong_here
        types = ", ".join(f"{n} {name} ({values[name]} values)" for name, n in sorted(counts.items()))
        print(f"{'DIFFERS' if wrong_here else 'equal  '} {pathlib.Path(path).name}: {types}", flush=True)
        for text in wrong_here:
            print(f"  {text}")
    if compared == 0:
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
