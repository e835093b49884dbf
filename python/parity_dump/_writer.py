"""Writes a dump folder step by step, so that an interruption loses at most the step it falls into.

A step is written as `step-NNNN.safetensors.part` behind a reserved header and renamed when it is whole; the
manifest is replaced after every step, and says `complete` only at the end.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import struct

from ._arrays import array, integers

SCHEMA = "parity-dump/1"
MANIFEST = "manifest.json"
# Bytes kept free for the header of the first step: some 2000 tensors. Later steps keep what the one before needed.
HEADER_BYTES = 1 << 18
# (H, T, S): the only tensors whose token rows are not on the first axis.
MATRICES = ("attn_scores", "attn_probs")
_NAME = re.compile(r"(blk\.(0|[1-9][0-9]*)\.)?[A-Za-z0-9_.#-]+")


class DumpError(Exception):
    """What was asked for makes no dump that parity could read."""


class Writer:
    """A dump folder that is being written.

    `producer` is a name, or a dict of `name`, `version`, `backend`, `device`; `numerics` is in the words of
    docs/dumps.md (`f32`, `bf16 storage=bf16 kv=bf16`, …), None lets parity infer it; `model` is a dict of `file`,
    `architecture` and `name`; `provenance` keeps whatever else is worth knowing, text by text.

    As a context manager it marks the dump complete at the end, unless an exception ends it.
    """

    def __init__(self, path, producer, numerics=None, model=None, prompt=None, provenance=None):
        self.path = pathlib.Path(path)
        producer = {"name": producer} if isinstance(producer, str) else dict(producer)
        if not producer.get("name"):
            raise DumpError("a producer has a name: producer='my-engine'")
        self.manifest = {
            "schema": SCHEMA,
            "producer": {k: producer.get(k) for k in ("name", "version", "backend", "device")} | {"numerics": numerics},
            "model": {k: (model or {}).get(k) for k in ("file", "fingerprint", "architecture", "name")},
            "tokens": [],
            "prompt": prompt,
            "steps": [],
            "rows": {},
            "provenance": {k: str(v) for k, v in (provenance or {}).items()},
            "complete": False,
        }
        self._open = None
        self._reserve = HEADER_BYTES
        self._row_shapes, self._positions, self._partial = {}, {}, set()
        _clear(self.path)
        self._write_manifest()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.close()
        else:
            self.discard_step()

    @contextlib.contextmanager
    def step(self, tokens, positions=None):
        """One forward pass over `tokens` (T,); `positions` (T,) follow the last step's where they are not given."""
        self.begin_step(tokens, positions)
        try:
            yield self
        except BaseException:
            self.discard_step()
            raise
        self.end_step()

    def begin_step(self, tokens, positions=None):
        """Starts a forward pass over `tokens` (T,)."""
        if self._open:
            raise DumpError("the step before is not finished: call end_step() first")
        tokens = integers(tokens)
        start = len(self.manifest["tokens"])
        positions = list(range(start, start + len(tokens))) if positions is None else integers(positions)
        if not tokens or len(positions) != len(tokens) or len(set(positions)) != len(positions):
            raise DumpError(f"a step has a position of its own for each token: {len(tokens)} tokens, {len(positions)} positions")
        self._open = _Step(self.path / f"step-{len(self.manifest['steps']):04}.safetensors", tokens, positions, self._reserve)

    def tensor(self, name, value, rows=None):
        """Adds a tensor to the open step, slowest axis first, one row for each of the step's positions.

        `rows` lists the positions that it has where these are not all of the step's. A name that was used in this
        step already gets `#2`, `#3` and so on.
        """
        step = self._open
        if not step:
            raise DumpError(f"{name}: no step is open: call begin_step(tokens) first")
        if not _NAME.fullmatch(name) or name == "tokens":
            raise DumpError(f"`{name}` is no name for a tensor: embed, blk.0.q_rope, logits, or blk.N.your_own_name")
        value = array(value, name)
        axis = 1 if name.split(".")[-1] in MATRICES else 0
        rows = step.positions if rows is None else integers(rows)
        if not set(rows) <= set(step.positions):
            raise DumpError(f"{name}: rows {rows} are not all positions of the step, {step.positions}")
        if value.ndim < 2 or value.shape[axis] != len(rows) or 0 in value.shape:
            raise DumpError(
                f"{name}: expected {len(rows)} rows, one for each position, on axis {axis} of two or more; "
                f"found shape {tuple(value.shape)}"
            )
        shape = tuple(value.shape[:1] if axis else value.shape[1:])
        if self._row_shapes.setdefault(name, shape) != shape:
            raise DumpError(f"{name}: rows of {shape}, but of {self._row_shapes[name]} in an earlier step")
        step.add(name, value, rows)

    def end_step(self):
        """Finishes the open step: its file gets its name, and the manifest lists it."""
        step, self._open = self._open, None
        if not step:
            raise DumpError("no step is open")
        self._reserve = step.finish()
        tokens = self.manifest["tokens"]
        tokens.extend([0] * (max(step.positions) + 1 - len(tokens)))
        for token, position in zip(step.tokens, step.positions):
            tokens[position] = token
        self._merge_rows(step)
        self.manifest["steps"].append({"file": step.path.name, "positions": step.positions})
        self._write_manifest()

    def discard_step(self):
        """Drops the open step, if any: it was interrupted."""
        step, self._open = self._open, None
        if step:
            step.discard()

    def close(self):
        """Marks the dump complete."""
        if self._open:
            raise DumpError("the last step is not finished: call end_step() first")
        self.manifest["complete"] = True
        self._write_manifest()

    def _merge_rows(self, step):
        """`rows` lists a tensor once it lacks a position of one of the steps that it is in."""
        for name in step.header:
            self._positions.setdefault(name, []).extend(step.rows.get(name, step.positions))
        self._partial |= set(step.rows)
        self.manifest["rows"] = {name: self._positions[name] for name in sorted(self._partial)}

    def _write_manifest(self):
        path = self.path / MANIFEST
        part = path.with_name(MANIFEST + ".part")
        part.write_text(json.dumps(self.manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)


class _Step:
    """A step file under its temporary name."""

    def __init__(self, path, tokens, positions, reserve):
        self.path, self.tokens, self.positions, self.reserve = path, tokens, positions, reserve
        self.header, self.rows, self.end = {}, {}, 0
        self.part = path.with_name(path.name + ".part")
        self.file = open(self.part, "wb")
        self.file.seek(8 + reserve)

    def add(self, name, value, rows):
        spelt, count = name, 1
        while spelt in self.header:
            count += 1
            spelt = f"{name}#{count}"
        data = value.bytes()
        offsets = [self.end, self.end + len(data)]
        self.header[spelt] = {"dtype": value.dtype, "shape": list(value.shape), "data_offsets": offsets}
        self.file.write(data)
        self.end += len(data)
        if rows != self.positions:
            self.rows[spelt] = rows

    def finish(self):
        """Writes the header and renames the file. Returns the header bytes that the next step should keep."""
        header = json.dumps(self.header, separators=(",", ":")).encode()
        if len(header) > self.reserve:
            self._make_room(len(header) + 4096 & ~7)
        with self.file as file:
            file.seek(0)
            file.write(struct.pack("<Q", self.reserve) + header.ljust(self.reserve))
        os.replace(self.part, self.path)
        return len(header) + len(header) // 4 + 1024 & ~7

    def _make_room(self, reserve):
        """Copies the tensors behind a longer header than was foreseen."""
        self.file.close()
        moved = self.part.with_name(self.part.name + "2")
        with open(self.part, "rb") as old, open(moved, "wb") as new:
            old.seek(8 + self.reserve)
            new.seek(8 + reserve)
            shutil.copyfileobj(old, new, 1 << 20)
        os.replace(moved, self.part)
        self.file, self.reserve = open(self.part, "r+b"), reserve

    def discard(self):
        self.file.close()
        self.part.unlink(missing_ok=True)


def _clear(path):
    """Makes the folder, and removes what an earlier dump left in it and nothing else."""
    path.mkdir(parents=True, exist_ok=True)
    entries = list(path.iterdir())
    for entry in entries:
        if not entry.name.startswith(("step-", MANIFEST, "seen.json")):
            raise DumpError(f"{path} holds `{entry.name}`, which is no part of a dump: choose another folder")
    for entry in entries:
        entry.unlink()
