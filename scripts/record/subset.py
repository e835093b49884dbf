#!/usr/bin/env python3
"""Copies a dump with only some of its checkpoints: subset.py DUMP OUT GLOB…

Inputs of the graph (leaf.*) are always copied, and so is the graph. Needs nothing but Python.
"""
import fnmatch
import json
import shutil
import struct
import sys
from pathlib import Path

if len(sys.argv) < 4:
    sys.exit(__doc__)
dump, out, globs = Path(sys.argv[1]), Path(sys.argv[2]), [*sys.argv[3:], "leaf.*"]
out.mkdir(parents=True)
manifest = json.loads((dump / "manifest.json").read_text())


def wanted(name):
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


for step in manifest["steps"]:
    data = (dump / step["file"]).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body, at, kept = json.loads(data[8 : 8 + size]), data[8 + size :], 0, {}
    parts = []
    for name, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])[0]):
        if name == "__metadata__" or not wanted(name):
            continue
        start, end = entry["data_offsets"]
        parts.append(body[start:end])
        kept[name] = {**entry, "data_offsets": [at, at + end - start]}
        at += end - start
    if "__metadata__" in header:
        kept["__metadata__"] = header["__metadata__"]
    text = json.dumps(kept, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (out / step["file"]).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
for graph in manifest.get("graphs", []):
    shutil.copy(dump / graph["file"], out / graph["file"])
manifest["rows"] = {name: rows for name, rows in manifest.get("rows", {}).items() if wanted(name)}
(out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
