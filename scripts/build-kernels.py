#!/usr/bin/env python3
"""Builds kernels/all.cu for every architecture with NVRTC: no GPU, no CUDA toolkit, no compiler needed.

    scripts/build-kernels.py            writes kernels/built/*.xz and manifest.json
    scripts/build-kernels.py --check    builds anew and compares byte for byte; asserts on registers and spills

NVRTC comes from the PyPI package nvidia-cuda-nvrtc-cu12, which the script fetches. Cubins come from NVRTC 12.9
and run on drivers from 525 on (570 for Blackwell); the PTX comes from NVRTC 12.0, so that every driver from 525
on can compile it. NVRTC's output is the same on every machine. It is kept compressed; what is compared, and what the
manifest has the hashes of, is the output itself.
"""
import argparse
import concurrent.futures
import ctypes
import hashlib
import itertools
import json
import lzma
import os
import pathlib
import struct
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
BUILT = KERNELS / "built"
CUBIN_NVRTC, PTX_NVRTC = "12.9.86", "12.0.140"
# file name, NVRTC version, --gpu-architecture
TARGETS = [
    ("sm_75.cubin", CUBIN_NVRTC, "sm_75"),
    ("sm_80.cubin", CUBIN_NVRTC, "sm_80"),
    ("sm_90a.cubin", CUBIN_NVRTC, "sm_90a"),
    ("sm_120.cubin", CUBIN_NVRTC, "sm_120"),
    ("compute_80.ptx", PTX_NVRTC, "compute_80"),
]
OPTIONS = ["--std=c++17"]
# Blocks have 256 threads at most, a multiprocessor 65536 registers: two blocks fit at 128 registers a thread.
REGISTERS_MAX = 128
# Blocks of these have 320 threads at most, or 256 whose registers are full of what is on its way.
REGISTERS_MAX_LARGE = {
    "linear_few": 224, "linear_wide": 255, "linear_warpgroup": 255,
    "attention_mma": 255, "attention_few": 255,
}
# Bytes of local memory that a thread may take: of linear_one what is fetched for the end waits there, outside its loop.
LOCAL_MAX = {"linear_one": 64}


def packed(content):
    """As xz packs it; machine code in words of 16 bytes."""
    words = {"lc": 0, "lp": 4, "pb": 4} if content.startswith(b"\x7fELF") else {}
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 8 << 20, **words}
    return lzma.compress(content, check=lzma.CHECK_CRC32, filters=[lzma2])


def libraries_of(version, cache):
    """The folder of one NVRTC wheel's libraries, unpacked below `cache`."""
    folder = cache / f"nvrtc-{version}"
    libraries = folder / "nvidia/cuda_nvrtc/lib"
    if not libraries.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        platforms = [f"--platform=manylinux{p}_x86_64" for p in ("2014", "1", "_2_17")]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run(pip + platforms + [f"nvidia-cuda-nvrtc-cu12=={version}"], check=True)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
            wheel.unlink()
    return libraries


def nvrtc(version, cache):
    """The library of one NVRTC wheel."""
    libraries = libraries_of(version, cache)
    # NVRTC looks its builtins up by name: opened first, they are found without LD_LIBRARY_PATH.
    for builtins in sorted(libraries.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(libraries / "libnvrtc.so.12"))
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    assert version.startswith(f"{major.value}.{minor.value}."), f"{version} loaded as {major.value}.{minor.value}"
    return library


def compile_all(library, arch):
    """all.cu compiled for `arch`: a cubin for sm_*, PTX for compute_*."""
    headers = [p for p in source_files() if p.name != "all.cu"]
    texts = (ctypes.c_char_p * len(headers))(*(p.read_bytes() for p in headers))
    names = (ctypes.c_char_p * len(headers))(*(p.name.encode() for p in headers))
    program = ctypes.c_void_p()
    source = (KERNELS / "all.cu").read_bytes()
    done = library.nvrtcCreateProgram(ctypes.byref(program), source, b"all.cu", len(headers), texts, names)
    assert done == 0, f"nvrtcCreateProgram: {done}"
    options = [o.encode() for o in [f"--gpu-architecture={arch}"] + OPTIONS]
    done = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    log = fetch(library, program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
    if log:
        print(f"{arch}: {log}", file=sys.stderr)
    if done != 0:
        sys.exit(1)
    binary = fetch(library, program, "CUBIN" if arch.startswith("sm_") else "PTX")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary if arch.startswith("sm_") else binary.rstrip(b"\0")


def built(target, cache):
    """What a target of TARGETS compiles to. In a process of its own: one NVRTC compiles one program at a time."""
    _, version, arch = target
    return compile_all(nvrtc(version, cache), arch)


def fetch(library, program, what):
    """One of the outputs of NVRTC: nvrtcGet{what}."""
    size = ctypes.c_size_t()
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, buffer) == 0
    return buffer.raw[: size.value]


def resources(cubin):
    """{kernel: (registers, bytes of local memory)}, from the .nv.info section of a cubin."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]

    def text(strings, at):
        return cubin[strings + at : cubin.index(b"\0", strings + at)].decode()

    named = {text(sections[names_index][4], s[0]): s for s in sections}
    symbols, info = named[".symtab"], named[".nv.info"]
    found = {}
    at, end = info[4], info[4] + info[5]
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if form == 4 and attribute in (0x2F, 0x11):  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE: symbol, value
            index, value = struct.unpack_from("<II", cubin, at + 4)
            (name,) = struct.unpack_from("<I", cubin, symbols[4] + index * 24)
            found.setdefault(text(sections[symbols[6]][4], name), {})[attribute] = value
        at += 4 + (length if form == 4 else 0)
    return {name: (used[0x2F], used.get(0x11, 0)) for name, used in found.items() if 0x2F in used}


def source_files():
    return sorted(p for p in KERNELS.iterdir() if p.suffix in (".cu", ".cuh"))


def check_resources(name, binary):
    """What is wrong with the registers and the local memory of the kernels of one cubin."""
    used = resources(binary)
    worst = sorted(((registers, kernel) for kernel, (registers, _) in used.items()), reverse=True)[:3]
    print(f"  {len(used)} kernels, most registers {worst}", file=sys.stderr)
    for kernel, (registers, local) in sorted(used.items()):
        if local > next((n for start, n in LOCAL_MAX.items() if kernel.startswith(start)), 0):
            yield f"{name}: {kernel} spills: {local} bytes of local memory"
        most = next((n for start, n in REGISTERS_MAX_LARGE.items() if kernel.startswith(start)), REGISTERS_MAX)
        if registers > most:
            yield f"{name}: {kernel} takes {registers} registers, more than {most}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is checked in, write nothing")
    parser.add_argument("--cache", type=pathlib.Path, default=ROOT / "target/nvrtc", help="where NVRTC lies")
    parser.add_argument("--only", help="this target alone (for development)")
    args = parser.parse_args()
    problems, artefacts = [], {}

    def deliver(name, content):
        is_packed = name != "manifest.json"
        path = BUILT / (f"{name}.xz" if is_packed else name)
        if not args.check:
            path.write_bytes(packed(content) if is_packed else content)
            return
        found = path.read_bytes() if path.exists() else None
        if found is not None and is_packed:
            found = lzma.decompress(found)
        if found != content:
            problems.append(f"{name}: what is checked in is not what the sources give")

    BUILT.mkdir(exist_ok=True)
    targets = [target for target in TARGETS if args.only in (None, target[0])]  # sm_100 takes the PTX
    for version in sorted({version for _, version, _ in targets}):
        libraries_of(version, args.cache)
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        # Each is told as it is there: all of them take minutes.
        for (name, version, arch), binary in zip(targets, pool.map(built, targets, itertools.repeat(args.cache))):
            artefacts[name] = {"nvrtc": version, "arch": arch, "sha256": hashlib.sha256(binary).hexdigest()}
            deliver(name, binary)
            print(f"{name}: {len(binary)} bytes", file=sys.stderr)
            if arch.startswith("sm_"):
                problems.extend(check_resources(name, binary))
    if args.only is None:
        sources = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in source_files()}
        manifest = {"options": OPTIONS, "sources": sources, "artefacts": artefacts}
        deliver("manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
