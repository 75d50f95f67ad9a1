"""Parsed rows in a file, before their splits are known: the state between two tasks of the first pass."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.data.preprocess.pieces import Piece, write_lists
from hostdev.data.preprocess.raw import RawRows
from hostdev.data.preprocess.rejected import RejectedLines
from hostdev.kernels.columns import narrowed

_INTEGERS = (np.uint8, np.uint16, np.uint32)


def write_rows(path: Path, rows: RawRows) -> str:
    """Write rows atomically; return the file's CRC-32."""
    about = {
        "shape": [list(rows.label.shape), list(rows.numbers.shape), list(rows.keys.shape)],
        "bags": len(rows.bags),
        "spaces": None if rows.texts is None else list(rows.texts),
        "missing": dict(rows.missing),
        "forms": {name: sorted(forms) for name, forms in rows.forms.items()},
    }
    content: dict[str, Any] = {"about": pa.array([json.dumps(about)])}
    content["label 0"] = np.ascontiguousarray(rows.label).reshape(-1)  # its name: `Piece` counts by it
    content["numbers"] = narrowed(np.ascontiguousarray(rows.numbers).reshape(-1))
    content |= {f"keys {i}": _narrow(np.ascontiguousarray(column)) for i, column in enumerate(rows.keys.T)}
    for i, (keys, lengths) in enumerate(rows.bags):
        content |= {f"bag {i}": _narrow(keys), f"lengths {i}": lengths}
    content |= {f"weights {i}": values for i, values in rows.bag_weights.items()}
    for i, texts in enumerate((rows.texts or {}).values()):
        content[f"texts {i}"] = texts
    content |= {name: value for name, value in (("weight", rows.weight), ("splits", rows.splits)) if value is not None}
    content |= rows.rejected.columns()
    return write_lists(path, content)


def read_rows(path: Path) -> RawRows:
    """Read the rows that `write_rows` wrote."""
    piece = Piece(path)
    about = json.loads(piece.values("about")[0].as_py())
    label, numbers, keys = about["shape"]
    columns = np.empty((keys[1], keys[0]), np.int64)
    for i, column in enumerate(columns):
        column[:] = piece.array(f"keys {i}")
    names = piece.names
    return RawRows(
        piece.array("label 0").reshape(label),
        piece.array("numbers").reshape(numbers).astype(np.float64),
        columns.T,
        tuple((piece.array(f"bag {i}").astype(np.int64), piece.array(f"lengths {i}")) for i in range(about["bags"])),
        _rejected(piece),
        piece.array("splits") if "splits" in names else None,
        texts=None
        if about["spaces"] is None
        else {space: piece.values(f"texts {i}") for i, space in enumerate(about["spaces"])},
        missing=about["missing"],
        forms={name: frozenset(forms) for name, forms in about["forms"].items()},
        weight=piece.array("weight") if "weight" in names else None,
        bag_weights={i: piece.array(f"weights {i}") for i in range(about["bags"]) if f"weights {i}" in names},
    )


def _rejected(piece: Piece) -> RejectedLines:
    reasons, texts = piece.values("reason"), piece.values("text")
    [file] = piece.values("file").to_pylist() or [""]
    return RejectedLines(file, piece.array("line"), lambda i: (reasons[i].as_py(), texts[i].as_py()))


def _narrow(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return integers in the smallest unsigned type that holds them; as they are if one is negative or large."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    dtype = next((kind for kind in _INTEGERS if low >= 0 and high <= np.iinfo(kind).max), np.int64)
    return values.astype(dtype)
