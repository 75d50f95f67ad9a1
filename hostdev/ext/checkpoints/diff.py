"""Differences between two checkpoints."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import Table
from hostdev.checkpoint.ranges import WEIGHTS
from hostdev.checkpoint.state import read_dense_tensors
from hostdev.kernels.arrays import Rows

_AT_ONCE = 1 << 18  # rows of a table by key that are compared at a time


def differences(one: Chain, other: Chain) -> list[str]:
    """Return a line for each difference between two checkpoints; [] if they are equal bit for bit."""
    a, b = Layers(one), Layers(other)
    lines = []
    if a.manifest.step != b.manifest.step:
        lines.append(f"step: {a.manifest.step:,} and {b.manifest.step:,}")
    tables = {layers: {table.name: table for table in layers.manifest.tables} for layers in (a, b)}
    for name in sorted(tables[a].keys() | tables[b].keys()):
        if name not in tables[a] or name not in tables[b]:
            lines.append(f"table {name}: only in {(one if name in tables[a] else other)[-1].path}")
        else:
            lines += _compare_tables(a, b, tables[a][name], tables[b][name])
    return lines + _compare_tensors(read_dense_tensors(a), read_dense_tensors(b))


def _compare_tables(a: Layers, b: Layers, mine: Table, theirs: Table) -> list[str]:
    lines: list[str] = []
    if (mine.keys is None) != (theirs.keys is None):
        return [f"table {mine.name}: by key only in {(a if mine.keys is not None else b).chain[-1].path}"]
    for what in ("rows", "dim", "optimizer", "dtype", "slots_dtype", "step"):
        if what == "rows" and mine.keys is not None and theirs.keys is not None:
            continue
        if getattr(mine, what) != getattr(theirs, what):
            lines.append(f"table {mine.name}: {what} {getattr(mine, what)} and {getattr(theirs, what)}")
    if mine.arguments != theirs.arguments:
        lines.append(f"table {mine.name}: hyperparameters {mine.arguments} and {theirs.arguments}")
    if mine.history != theirs.history:
        lines.append(f"table {mine.name}: the step histories (learning rates) differ")
    if mine.keys is not None and theirs.keys is not None and mine.dim == theirs.dim:
        return lines + _compare_keys(a, b, mine, theirs)
    if (mine.rows, mine.dim) != (theirs.rows, theirs.dim):
        return lines
    columns = [WEIGHTS, *mine.slots, *mine.row_slots]
    for column in columns:
        if column not in (WEIGHTS, *theirs.slots, *theirs.row_slots):
            continue
        count, first, most = 0, -1, 0.0
        begin = 0
        for x, y in _zip_rows(a.column(mine.name, column), b.column(mine.name, column)):
            rows, by = _unequal(x, y)
            if len(rows):
                first = begin + int(rows[0]) if first < 0 else first
            count, begin, most = count + len(rows), begin + len(x), float(np.maximum(most, by))
        if count:
            lines.append(
                f"table {mine.name}, {column}: {count:,} of {mine.rows:,} rows differ (first row {first}), {_by(most)}"
            )
    return lines


def _compare_keys(a: Layers, b: Layers, mine: Table, theirs: Table) -> list[str]:
    assert mine.keys is not None and theirs.keys is not None
    name, lines = mine.name, []
    keys = a.merged(name), b.merged(name)
    if mine.keys.unknown != theirs.keys.unknown:
        lines.append(f"table {name}: out-of-vocabulary rows {mine.keys.unknown} and {theirs.keys.unknown}")
    if mine.keys.step != theirs.keys.step:
        lines.append(f"table {name}: key steps {mine.keys.step:,} and {theirs.keys.step:,}")
    ours, others = keys[0].columns, keys[1].columns
    both, at, to = np.intersect1d(ours.keys, others.keys, assume_unique=True, return_indices=True)
    for layers, count in ((a, len(ours.keys)), (b, len(others.keys))):
        if count > len(both):
            lines.append(f"table {name}: {count - len(both):,} of {count:,} keys are only in {layers.chain[-1].path}")
    pairs: list[tuple[str, Any, Any]] = [("last step", ours.last, others.last), ("uses", ours.uses, others.uses)]
    for what, x, y in pairs:
        if (number := int((x[at] != y[to]).sum())) > 0:
            lines.append(f"table {name}: the {what} of {number:,} of {len(both):,} keys differ")
    counts = [dict(zip(one.others.waiting.tolist(), one.others.counts.tolist(), strict=True)) for one in keys]
    if counts[0] != counts[1] or not np.array_equal(keys[0].others.sketch, keys[1].others.sketch):
        lines.append(f"table {name}: the uses of keys that wait for a row differ")
    unknown = [state.unknown for state in (mine.keys, theirs.keys)]
    shared = [row for row in unknown[0] if row in unknown[1]]
    rows = [
        np.concatenate([[names.index(row) for row in shared], len(names) + places]).astype(np.int64)
        for names, places in zip(unknown, (at, to), strict=True)
    ]
    columns = [column for column in (*mine.slots, *mine.row_slots) if column in (*theirs.slots, *theirs.row_slots)]
    for column in (WEIGHTS, *columns):
        count, most = 0, 0.0
        for start in range(0, len(rows[0]), _AT_ONCE):
            parts = [part[start : start + _AT_ONCE] for part in rows]
            x, y = (layers.gather(name, part, [column])[column] for layers, part in zip((a, b), parts, strict=True))
            differ, by = _unequal(x.reshape(len(x), -1), y.reshape(len(y), -1))
            count, most = count + len(differ), float(np.maximum(most, by))
        if count:
            lines.append(f"table {name}, {column}: {count:,} of {len(rows[0]):,} rows differ, {_by(most)}")
    return lines


def _by(most: float) -> str:
    """Return text for the largest difference, which is NaN if any difference is."""
    return "some by NaN" if math.isnan(most) else f"by at most {most:.3g}"


def _unequal(x: Rows, y: Rows) -> tuple[npt.NDArray[np.int64], float]:
    """Return the indices of the rows of x and y, [n, D], whose bits differ, and the largest difference, 0.0 if none."""
    rows = np.flatnonzero((x.view(np.uint32) != y.view(np.uint32)).any(1))
    if not len(rows):
        return rows, 0.0
    with np.errstate(invalid="ignore"):
        return rows, float(np.abs(x[rows].astype(np.float64) - y[rows]).max())


def _zip_rows(ours: Iterator[Rows], theirs: Iterator[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Yield pairs of equally long chunks of two columns, each given in chunks of any length."""
    x = y = np.empty((0, 0), np.float32)
    while True:
        try:
            x = x if len(x) else next(ours)
            y = y if len(y) else next(theirs)
        except StopIteration:
            return
        n = min(len(x), len(y))
        yield x[:n], y[:n]
        x, y = x[n:], y[n:]


def _compare_tensors(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    lines = []
    for name in sorted(mine.keys() | theirs.keys()):
        x, y = mine.get(name), theirs.get(name)
        if x is None or y is None:
            lines.append(f"{name}: only in {'the other' if x is None else 'the first'} checkpoint")
        elif x.shape != y.shape or x.dtype != y.dtype:
            lines.append(f"{name}: shape and dtype are {list(x.shape)} {x.dtype} and {list(y.shape)} {y.dtype}")
        elif not torch.equal(_bits(x), _bits(y)):
            most = (x.double() - y.double()).abs().max().item() if x.is_floating_point() else None
            lines.append(f"{name}: differs" + (f" by at most {most:.3g}" if most is not None else ""))
    return lines


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of floating-point values as integers, so that a NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(integers[values.element_size()]) if values.is_floating_point() else values
