#!/usr/bin/env python3
"""Runs single ops by llama.cpp's own CPU kernels and writes inputs, parameters and results down, for `src/ops/tests`.

  op-cases.py LIBRARIES OUT [--cpu haswell] [--scale N]

LIBRARIES holds libggml-base.so and libggml-cpu-NAME.so (or libggml-cpu.so); name it in LD_LIBRARY_PATH too. --scale
makes rows N times as long. `PARITY_OP_CASES=OUT cargo test ops::` then judges these instead of the cases in the tests.
"""

import argparse
import ctypes as c
import random
import struct
from pathlib import Path

TYPES = {0: ("f32", 4), 1: ("f16", 2), 26: ("i32", 4), 27: ("i64", 8), 30: ("bf16", 2)}
NUMBER = {name: number for number, (name, _) in TYPES.items()}


class Tensor(c.Structure):
    pass


Tensor._fields_ = [
    ("type", c.c_int), ("buffer", c.c_void_p), ("ne", c.c_int64 * 4), ("nb", c.c_size_t * 4), ("op", c.c_int),
    ("op_params", c.c_uint32 * 16), ("flags", c.c_int32), ("src", c.POINTER(Tensor) * 10),
    ("view_src", c.POINTER(Tensor)), ("view_offs", c.c_size_t), ("data", c.c_void_p),
]
Pointer = c.POINTER(Tensor)


class InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


class Ggml:
    """Calls ggml: pointers as they are, Python's floats as float, whole numbers as int or int64_t."""

    def __init__(self, folder, cpu):
        self.base = c.CDLL(str(folder / "libggml-base.so"), mode=c.RTLD_GLOBAL)
        name = f"libggml-cpu-{cpu}.so" if cpu else "libggml-cpu.so"
        self.cpu = c.CDLL(str(folder / name), mode=c.RTLD_GLOBAL)
        self.base.ggml_init.restype = c.c_void_p
        self.cpu.ggml_cpu_init()
        self.ctx = c.c_void_p(self.base.ggml_init(InitParams(1 << 28, None, False)))

    def __call__(self, name, *args, wide=()):
        function = getattr(self.base, name)
        function.restype = Pointer
        given = [self.ctx]
        for i, arg in enumerate(args):
            if isinstance(arg, float):
                given.append(c.c_float(arg))
            elif isinstance(arg, int):
                given.append(c.c_int64(arg) if i in wide else c.c_int(arg))
            else:
                given.append(arg)
        return function(*given)

    def compute(self, tensor):
        self.base.ggml_new_graph.restype = c.c_void_p
        graph = c.c_void_p(self.base.ggml_new_graph(self.ctx))
        self.base.ggml_build_forward_expand(graph, tensor)
        status = self.cpu.ggml_graph_compute_with_ctx(self.ctx, graph, c.c_int(1))
        assert status == 0, status

    def describe(self, tensor):
        self.base.ggml_op_desc.restype = c.c_char_p
        return self.base.ggml_op_desc(tensor).decode()


def size(tensor):
    return TYPES[tensor.contents.type][1]


def elements(tensor):
    count = 1
    for extent in tensor.contents.ne:
        count *= extent
    return count


def span(tensor):
    """Elements from the first to behind the last in memory."""
    t = tensor.contents
    return sum((t.ne[i] - 1) * t.nb[i] for i in range(4)) // size(tensor) + 1


def read(tensor, count):
    raw = c.string_at(tensor.contents.data, count * size(tensor))
    name = TYPES[tensor.contents.type][0]
    code = {"f32": "I", "f16": "H", "bf16": "H", "i32": "i", "i64": "q"}[name]
    values = struct.unpack(f"<{count}{code}", raw)
    return " ".join(str(v) if code in "iq" else f"{v:x}" for v in values)


class Cases:
    def __init__(self, ggml, out, scale):
        self.ggml, self.out, self.scale, self.random = ggml, out, scale, random.Random(12)

    def tensor(self, shape, kind="f32", values=None, low=-3.0, high=3.0):
        """`shape` is slowest axis first; random values unless given."""
        ne = list(reversed(shape)) + [1] * (4 - len(shape))
        tensor = self.ggml("ggml_new_tensor_4d", NUMBER[kind], *ne, wide=(1, 2, 3, 4))
        count = elements(tensor)
        if values is None:
            values = [self.random.uniform(low, high) for _ in range(count)]
        values = list(values)
        assert len(values) == count, (shape, len(values))
        code = {"f32": "f", "f16": "e", "i32": "i", "i64": "q"}[kind]
        raw = struct.pack(f"<{count}{code}", *values)
        c.memmove(tensor.contents.data, raw, len(raw))
        return tensor

    def wide(self, *shape):
        return self.tensor([*shape[:-1], shape[-1] * self.scale])

    def special(self):
        """Values from the smallest to the largest, over whole vectors and a rest."""
        edges = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 9.99, -9.99, 10.0, -10.0, 9.998, 20.0, 20.5, -20.0, -16.0, -30.0,
                 88.0, -88.0, 89.0, -89.0, -103.0, 100.0, 1e-3, -1e-3, 0.5, -0.5, 3e4]
        spread = [self.random.uniform(-9, 9) for _ in range(21 * self.scale)]
        return self.tensor([1, len(edges) + len(spread)], values=edges + spread)

    def view(self, tensor, shape, strides, offset):
        """A window; strides in elements."""
        ne, b = list(reversed(shape)), size(tensor)
        nb = [stride * b for stride in reversed(strides[:3])]
        args = [tensor, *ne, *[c.c_size_t(n) for n in nb], c.c_size_t(offset * b)]
        return self.ggml("ggml_view_4d", *args, wide=(1, 2, 3, 4))

    def write(self, tensor):
        t = tensor.contents
        line = [f"case {self.ggml.describe(tensor)}", " ".join(f"{w:x}" for w in t.op_params)]
        sources = [(slot, src) for slot, src in enumerate(t.src) if src]
        for slot, src in sources:
            s = src.contents
            if c.addressof(s) == c.addressof(t):
                continue
            strides = [n // size(src) for n in s.nb]
            line.append(f"src {slot} {TYPES[s.type][0]} {' '.join(map(str, s.ne))} {' '.join(map(str, strides))}")
            line.append(read(src, span(src)))
        self.ggml.compute(tensor)
        line.append(f"dst {TYPES[t.type][0]} {' '.join(map(str, t.ne))}")
        assert span(tensor) == elements(tensor), "a result without gaps"
        line.append(read(tensor, elements(tensor)))
        self.out.write("\n".join(line) + "\n")


def elementwise(cases, g):
    a, b = cases.wide(2, 3, 2, 7), cases.wide(1, 3, 1, 7)
    for op in ["add", "sub", "mul", "div"]:
        cases.write(g(f"ggml_{op}", a, b))
    half = cases.tensor([2, 9], "f16")
    cases.write(g("ggml_add", half, cases.tensor([1, 9], "f16")))
    ids = cases.tensor([3, 2], "i32", [4, 0, 1, 1, 2, 4])
    cases.write(g("ggml_add_id", cases.wide(3, 2, 6), cases.wide(5, 6), ids))
    special = cases.special()
    for op in ["sqr", "abs", "sgn", "tanh", "relu", "sigmoid", "gelu", "silu", "exp", "softplus"]:
        cases.write(g(f"ggml_{op}", special))
    cases.write(g("ggml_sqrt", cases.tensor([1, 20], low=0.0, high=9.0)))
    for scale, bias in [(0.125, 0.0), (0.3, 0.7), (1.0, 1e-6), (0.0, -float("inf")), (0.0, 0.0)]:
        cases.write(g("ggml_scale_bias", special, scale, bias))
    for low, high in [(-1.0, 2.0), (-float("inf"), 3.0), (0.0, float("inf"))]:
        cases.write(g("ggml_clamp", special, low, high))


def gated(cases, g):
    gate, up, both = cases.special(), cases.special(), cases.wide(3, 38)
    c.memmove(up.contents.data, cases.tensor([1, gate.contents.ne[0]]).contents.data, 4 * elements(up))
    for kind in [0, 1, 2]:
        cases.write(g("ggml_glu_split", gate, up, kind))
        for swapped in [0, 1]:
            cases.write(g("ggml_glu", both, kind, c.c_bool(swapped)))
    gate, up = cases.tensor([3, 19], low=-9, high=9), cases.tensor([3, 19], low=-9, high=9)
    cases.write(g("ggml_swiglu_oai", gate, up, 1.702, 7.0))
    cases.write(g("ggml_swiglu_clamp", gate, up, 7.0))


def reductions(cases, g):
    row = 37 * cases.scale
    x = cases.wide(2, 3, 37)
    gaps = cases.view(x, [1, 2, 3, row - 5], [6 * row, 3 * row, row, 1], 4)
    far = cases.tensor([3, row], low=99, high=101)
    small = cases.tensor([3, row], values=[v * 1e-4 for v in range(3 * row)])
    zero = cases.tensor([2, 8], values=[0.0] * 8 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0])
    for op in ["rms_norm", "norm"]:
        for source, eps in [(x, 1e-5), (gaps, 1e-6), (far, 1e-5), (small, 1e-2), (far, 0.0)]:
            cases.write(g(f"ggml_{op}", source, eps))
    cases.write(g("ggml_rms_norm", zero, 0.0))
    for source, eps in [(x, 1e-6), (gaps, 1e-6), (small, 0.5), (small, 0.0)]:
        cases.write(g("ggml_l2_norm", source, eps))
    for source in [x, gaps, far]:
        cases.write(g("ggml_sum_rows", source))
    scores = cases.tensor([1, 6, 2, 21 * cases.scale], low=-20, high=20)
    width = 21 * cases.scale
    masked = [0.0 if m <= t + 5 else -float("inf") for t in range(4) for m in range(width)]
    distance = [-float(abs(m - t)) if m <= t + 5 else -float("inf") for t in range(4) for m in range(width)]
    sinks = cases.tensor([6])
    for mask, bias in [(None, 0.0), (masked, 0.0), (distance, 8.0)]:
        for kind in ["f16", "f32"]:
            given = None if mask is None else cases.tensor([4, width], kind, mask)
            cases.write(g("ggml_soft_max_ext", scores, given, 0.25, bias))
    for given in [None, cases.tensor([4, width], "f16", masked)]:
        out = g("ggml_soft_max_ext", scores, given, 0.25, 0.0)
        g.base.ggml_soft_max_add_sinks(out, sinks)
        cases.write(out)
    nothing = cases.tensor([1, 8], "f32", [-float("inf")] * 8)
    cases.write(g("ggml_soft_max_ext", cases.tensor([1, 8]), nothing, 1.0, 0.0))
    plane = cases.tensor([2, 6, 9])
    for kind, k0, k1, s0, s1, p0, p1 in [(0, 4, 1, 4, 1, 0, 0), (0, 3, 2, 2, 2, 1, 1), (1, 3, 2, 2, 1, 1, 0)]:
        cases.write(g("ggml_pool_2d", plane, kind, k0, k1, s0, s1, float(p0), float(p1)))
    empty = cases.tensor([1, 8], values=[-float("inf")] * 4 + [1.0, 2.0, -1.0, 0.5])
    cases.write(g("ggml_pool_2d", empty, 0, 4, 1, 4, 1, 0.0, 0.0))


def rotations(cases, g):
    x = cases.tensor([4, 1, 24])
    positions = cases.tensor([4], "i32", [0, 3, 255, 40000])
    factors = cases.tensor([12], low=1.0, high=8.0)
    four = cases.tensor([16], "i32", [0, 3, 255, 4000, 1, 5, 7, 9, 2, 4, 8, 16, 0, 1, 0, 900])
    for mode in [0, 2]:
        for dims, ff in [(24, None), (16, None), (24, factors)]:
            cases.write(g("ggml_rope_ext", x, positions, ff, dims, mode, 4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0))
        yarn = (20, mode, 4096, 1e6, 0.25, 1.0, 1.1, 32.0, 1.0)
        cases.write(g("ggml_rope_ext", x, positions, factors, *yarn))
        cases.write(g("ggml_rope_ext_back", x, positions, None, *yarn))
        out = g("ggml_rope_ext", x, positions, None, 16, mode, 4096, 1.6e5, 1.0, 0.0, 1.0, 32.0, 1.0)
        g.base.ggml_rope_set_offset.restype = Pointer
        g.base.ggml_rope_set_offset(out, c.c_int(8))
        cases.write(out)
    for mode, dims, sections in [(8, 24, (2, 4, 4, 2)), (8, 16, (4, 2, 2, 0)), (40, 24, (4, 4, 4, 0)),
                                 (24, 12, (3, 9, 0, 0)), (24, 12, (3, 3, 3, 3))]:
        given = (c.c_int * 4)(*sections)
        for ff in [None, factors]:
            args = (dims, given, mode, 4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
            cases.write(g("ggml_rope_multi", x, four, ff, *args))


def movements(cases, g):
    x = cases.tensor([3, 2, 5])
    swapped = g("ggml_permute", x, 0, 2, 1, 3)
    rotated = g("ggml_permute", x, 2, 0, 1, 3)
    for source in [x, swapped, rotated]:
        cases.write(g("ggml_cont", source))
        cases.write(g("ggml_dup", source))
        cases.write(g("ggml_cast", source, NUMBER["f16"]))
    cases.write(g("ggml_cont_2d", swapped, 15, 2, wide=(1, 2)))
    for kind in ["f16", "f32"]:
        cases.write(g("ggml_cpy", cases.tensor([6, 5]), cases.tensor([3, 10], kind, [0.0] * 30)))
    numbers = cases.tensor([2, 4], "i32", [1, -2, 3, 40000, 5, 6, -7, 8])
    cases.write(g("ggml_cast", numbers, NUMBER["f32"]))
    cases.write(g("ggml_cast", cases.tensor([2, 3], values=[2.7, -2.7, 0.5, -0.5, 8.0, -9.99]), NUMBER["i32"]))
    cases.write(g("ggml_cast", cases.tensor([2, 3], "f16"), NUMBER["f32"]))
    cases.write(g("ggml_repeat_4d", cases.tensor([1, 2, 3]), 6, 4, 5, 1, wide=(1, 2, 3, 4)))
    a = cases.tensor([2, 3, 4])
    for dim, shape in [(0, [2, 3, 2]), (1, [2, 1, 4]), (2, [3, 3, 4])]:
        cases.write(g("ggml_concat", a, cases.tensor(shape), dim))
    table = cases.tensor([2, 5, 4])
    ids = cases.tensor([2, 3], "i32", [4, 0, 0, 1, 3, 2])
    cases.write(g("ggml_get_rows", table, ids))
    cases.write(g("ggml_get_rows", cases.tensor([5, 4], "f16"), cases.tensor([3], "i32", [4, 0, 3])))
    cases.write(g("ggml_get_rows", cases.tensor([5, 1], "i32", range(5)), cases.tensor([3], "i32", [4, 0, 3])))
    for kind, where in [("f32", "i64"), ("f16", "i64"), ("f16", "i32")]:
        ids = cases.tensor([2, 2], where, [3, 0, 1, 4])
        new = cases.tensor([2, 2, 4])
        cases.write(g("ggml_set_rows", cases.tensor([2, 5, 4], kind), new, ids))
    one = cases.tensor([1, 2], "i64", [3, 0])
    cases.write(g("ggml_set_rows", cases.tensor([4, 5, 3], "f16"), cases.tensor([4, 2, 3]), one))
    for value in [0.0, -float("inf"), 0.1]:
        cases.write(g("ggml_fill", cases.tensor([2, 3]), value))
    for start, stop, step in [(0.0, 7.0, 1.0), (2.0, 9.5, 1.5)]:
        cases.write(g("ggml_arange", start, stop, step))
    kernel, planes = cases.tensor([4, 3, 3, 2]), cases.tensor([2, 3, 5, 6])
    for numbers in [(1, 1, 0, 0, 1, 1), (2, 3, 1, 2, 1, 1), (1, 2, 2, 1, 2, 1)]:
        for kind in ["f32", "f16"]:
            cases.write(g("ggml_im2col", kernel, planes, *numbers, c.c_bool(True), NUMBER[kind]))
    line = cases.tensor([4, 3, 2]), cases.tensor([2, 3, 7])
    cases.write(g("ggml_im2col", *line, 2, 0, 1, 0, 2, 0, c.c_bool(False), NUMBER["f32"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", default="haswell", help="which libggml-cpu-NAME.so; empty for libggml-cpu.so")
    parser.add_argument("--scale", type=int, default=1)
    args = parser.parse_args()
    ggml = Ggml(args.libraries, args.cpu)
    with args.out.open("w") as out:
        cases = Cases(ggml, out, args.scale)
        for family in [elementwise, gated, reductions, rotations, movements]:
            family(cases, ggml)


if __name__ == "__main__":
    main()
