"""One call for arrays that are already there."""

import re

from ._arrays import array, integers
from ._writer import MATRICES, DumpError, Writer

# Axes of a row: what is left of a tensor's shape once its token axis is taken out.
_HEADS = ("q", "k", "v", "q_norm", "k_norm", "q_rope", "k_rope")
# How names of nodes begin that may have an axis of the chosen experts.
_EXPERTS = "ffn_moe_"


def save(tensors, path, tokens, producer="python", numerics=None, model=None, prompt=None, names=None,
         layouts=None, rows=None, positions=None, provenance=None):  # fmt: skip
    """Writes arrays as a dump folder and returns its path.

    `tensors` is a dict of name to array, of one forward pass over `tokens` (T,), or a list of such dicts: one a
    forward pass, a prefill and its decode steps, which follow one another in `tokens` unless `positions` lists the
    positions of each. `tokens` may be a batch of one text, or nested as the passes are. The last token, which
    `generate` returns without a pass over it, may stand in `tokens`.

    `names` translates names with patterns, {"model.layers.{n}.self_attn.o_proj": "blk.{n}.attn_out"}. `layouts`
    gives the axes of tensors that are not (T, …), by id or by what follows the layer: {"q_rope": "BHTE"}, where T
    is the token axis, B has length 1, and the other axes keep their order. Leading axes of length 1 need no
    layout. `rows` lists the positions of tensors that lack some, {"logits": [4]}; a single row of logits of a
    longer pass is the last one's.
    """
    steps = [tensors] if isinstance(tensors, dict) else list(tensors)
    tokens = _tokens(tokens, len(steps))
    translate = _translator(names or {})
    steps = [{translate(name): value for name, value in step.items()} for step in steps]
    if isinstance(tensors, dict) and positions is None:
        positions = range(len(tokens))
    positions = _positions(steps, tokens, positions, layouts or {})
    with Writer(path, producer, numerics, model, prompt, provenance) as dump:
        for step, at in zip(steps, positions):
            with dump.step([tokens[p] for p in at], at):
                for name, value in step.items():
                    value = arrange(array(value, name), name, len(at), layouts or {})
                    dump.tensor(name, value, _rows(name, value, at, rows or {}))
    return dump.path


def arrange(value, name, count, layouts):
    """`value` with its token axis first, of attention matrices (H, T, S); `count` is the number of positions."""
    kind = name.split(".")[-1]
    layout = layouts.get(name, layouts.get(kind))
    if layout is not None:
        return _by_layout(value, name, layout, kind in MATRICES)
    depth = 3 if kind in MATRICES + _HEADS else 2
    while value.ndim > depth and value.shape[0] == 1 and not _is_of_experts(value, kind, count):
        value = value.map(lambda v: v[0])
    if kind in _HEADS and value.ndim == 3 and value.shape[0] != count and value.shape[1] == count:
        raise DumpError(
            f"{name}: shape {tuple(value.shape)} has its {count} token rows on the second axis, where heads are "
            f"expected; hint: layouts={{'{kind}': 'HTE'}}, or 'BHTE' with a leading 1"
        )
    return value


def _is_of_experts(value, kind, count):
    """Whether it is what the chosen experts of a decode step come to, (1, experts, F), and no batch of one text."""
    return kind.startswith(_EXPERTS) and value.ndim == 3 and value.shape[0] == count != value.shape[1]


def _by_layout(value, name, layout, matrix):
    while value.ndim > len(layout) and value.shape[0] == 1:
        value = value.map(lambda v: v[0])
    if len(layout) != value.ndim or layout.count("T") != 1 or len(set(layout)) != len(layout):
        raise DumpError(f"{name}: the layout {layout!r} does not fit the shape {tuple(value.shape)}")
    if "B" in layout:
        batch = layout.index("B")
        if value.shape[batch] != 1:
            raise DumpError(f"{name}: {value.shape[batch]} texts on axis {batch}; a dump is of one: choose it first")
        value = value.map(lambda v: v.squeeze(batch))
        layout = layout.replace("B", "")
    return value if matrix else value.map(lambda v: _to_front(v, layout.index("T")))


def _to_front(values, axis):
    return values.transpose([axis] + [other for other in range(values.ndim) if other != axis])


def _tokens(given, steps):
    """The token ids of one text: in a flat list, in a batch of one, or in a list for each of the steps."""
    parts = list(given) if getattr(given, "ndim", 1) else [given]
    nested = [isinstance(part, (list, tuple)) or getattr(part, "ndim", 0) > 0 for part in parts]
    if not any(nested):
        return integers(given)
    if not all(nested) or len(parts) not in (1, steps):
        expected = "ids of one text" + (f", or of each of {steps} passes" if steps > 1 else "")
        raise DumpError(f"tokens: expected {expected}; found {len(parts)} entries, some of them lists: tokens[0]?")
    return [token for part in parts for token in integers(part)]


def _positions(steps, tokens, given, layouts):
    """The positions of each step: those given, or consecutive ones by the number of rows."""
    if given is not None:
        given = [given] if len(steps) == 1 and given and not hasattr(given[0], "__len__") else list(given)
        given = [integers(at) for at in given]
        if len(given) != len(steps) or any(p >= len(tokens) for at in given for p in at):
            raise DumpError(f"positions of {len(given)} steps for {len(steps)}, of {len(tokens)} tokens")
        return given
    out, first = [], 0
    for index, step in enumerate(steps):
        counts = [_row_count(array(value, name), name, layouts) for name, value in step.items()]
        last = first + max(counts, default=0)
        out.append(list(range(first, last)))
        if last > len(tokens) or last == first:
            raise DumpError(
                f"step {index}: expected 1 to {len(tokens) - first} rows, as many tokens are left; found "
                f"{last - first}; hint: positions=[[0, 1, …], …] says which rows each step has"
            )
        first = last
    if first < len(tokens) - 1:
        raise DumpError(f"expected rows for {len(tokens)} tokens (or all but the last), found {first} in all steps")
    return out


def _row_count(value, name, layouts):
    kind = name.split(".")[-1]
    has_axes = kind in _HEADS or kind.startswith(_EXPERTS)
    if kind in MATRICES or has_axes and value.ndim > 2 and not {name, kind} & set(layouts):
        return 0  # the other tensors of the step say it without doubt
    layout = layouts.get(name, layouts.get(kind))
    if layout is not None:
        return arrange(value, name, 0, layouts).shape[0]
    return value.shape[-2] if value.ndim >= 2 else 0


def _rows(name, value, positions, rows):
    listed = rows.get(name, rows.get(name.split(".")[-1]))
    if listed is not None:
        listed = set(integers(listed))
        return [p for p in positions if p in listed]
    if name == "logits" and value.ndim == 2 and value.shape[0] == 1 < len(positions):
        return positions[-1:]
    return None


def _translator(names):
    """A function of a name: what the first pattern that fits makes of it, or the name itself."""
    patterns = []
    for pattern, target in names.items():
        text = re.escape(pattern).replace(re.escape("{n}"), "(?P<n>[0-9]+)")
        patterns.append((re.compile(text), target))

    def translate(name):
        for pattern, target in patterns:
            if found := pattern.fullmatch(name):
                return target.replace("{n}", str(int(found["n"]))) if "n" in pattern.groupindex else target
        return name

    return translate
