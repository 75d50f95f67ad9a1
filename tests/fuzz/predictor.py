"""Inputs for `Predictor`: dicts, frames and Arrow data with values of every kind, and with broken buffers."""

import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

import hostdev
from tests.fuzz import checkpoints
from tests.fuzz.mutations import INTEGERS, VALUES
from tests.own_models import ThreeTables

COLUMNS = ("age", "user", "item", "kind", "genres")
ODD = [
    *VALUES,
    b"bytes",
    b"\xff\xfe",
    np.nan,
    np.float32(1),
    np.int64(3),
    np.str_("u1"),
    ["g1"],
    ["g1", None],
    ("g1",),
    {"g1"},
    object(),
    1 + 2j,
    [["g1"]],
    "u1",
    "i2",
    1,
    0,
    True,
    "g1|g2",
]
TYPES = [
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.int8(),
    pa.uint64(),
    pa.float16(),
    pa.float64(),
    pa.bool_(),
    pa.date32(),
    pa.timestamp("ns"),
    pa.list_(pa.string()),
    pa.null(),
    pa.decimal128(5, 2),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
]
_held: dict[str, Any] = {}


def make(base: Path) -> None:
    """Train a model on numbers, columns and a bag."""
    checkpoints.make(base)


def load(base: Path) -> None:
    """Open the predictor once, for all cases."""
    _held["predict"] = hostdev.Predictor(base / "run", model=ThreeTables)
    for rows in (_rows(3), pd.DataFrame(_rows(3)), pa.table(_rows(70))):
        assert np.isfinite(_held["predict"](rows)).all()


def run(base: Path, case: Path, draw: Random) -> None:
    """Predict rows with something wrong in one or two columns."""
    rows: Any = _rows(draw.choice([1, 3, 70]))
    for _ in range(draw.choice([1, 1, 2])):
        name, kind = draw.choice(COLUMNS), draw.randrange(4)
        if kind == 0:
            rows[name] = [draw.choice(ODD) for _ in rows[name]] if isinstance(rows[name], list) else draw.choice(ODD)
        elif kind == 1:
            rows[name] = draw.choice(ODD)
        elif kind == 2:
            rows.pop(name, None)
            rows[draw.choice(["other", "", name.upper()])] = [1]
            return _predict(rows, draw)
        else:
            rows[name] = _broken(len(rows["kind"]) if isinstance(rows["kind"], list) else 3, draw)
    return _predict(rows, draw)


def _predict(rows: Any, draw: Random) -> None:
    kind = draw.randrange(4)
    try:
        if kind == 1 and not any(isinstance(values, pa.Array) for values in rows.values()):  # pandas would read them
            rows = pd.DataFrame(rows)
        elif kind >= 2:
            arrays = {
                name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in rows.items()
            }
            rows = pa.table(arrays) if kind == 2 else pa.RecordBatch.from_arrays([*arrays.values()], names=[*arrays])
    except Exception:  # pandas and Arrow refuse such rows, so Predictor gets none
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _held["predict"](rows)


def _rows(n: int) -> dict[str, list[Any]]:
    return {
        "age": [i % 7 for i in range(n)],
        "user": [f"u{i}" for i in range(n)],
        "item": [f"i{i % 3}" for i in range(n)],
        "kind": [str(i % 2) for i in range(n)],
        "genres": [[f"g{k}" for k in range(i % 4)] for i in range(n)],
    }


def _broken(n: int, draw: Random) -> Any:
    """Return an Arrow array of n values whose offsets, indices or buffers may lead anywhere."""
    numbers = np.array([draw.choice(INTEGERS) for _ in range(n + 1)]).astype(np.int32)
    if draw.random() < 0.5:
        numbers = np.arange(n + 1, dtype=np.int32)
        numbers[draw.randrange(n + 1)] = draw.choice([-1, 2**31 - 1, 5, 10**6])
    texts, offsets = pa.py_buffer(draw.randbytes(4 * n)), pa.py_buffer(numbers)
    kind = draw.randrange(5)
    try:
        if kind == 0:
            return pa.Array.from_buffers(pa.string(), n, [None, offsets, texts])
        if kind == 1:
            inner = pa.array([f"g{i}" for i in range(n)])
            return pa.Array.from_buffers(pa.list_(pa.string()), n, [None, offsets], children=[inner])
        if kind == 2:
            indices = pa.Array.from_buffers(pa.int32(), n, [None, offsets])
            return pa.DictionaryArray.from_arrays(indices, pa.array(["u1", "u2"]), safe=False)
        if kind == 3:
            wide = np.array([draw.choice(INTEGERS[:-1]) for _ in range(n + 1)], np.int64)
            return pa.Array.from_buffers(pa.large_string(), n, [None, pa.py_buffer(wide), texts])
        return pa.nulls(n, draw.choice(TYPES))
    except (pa.ArrowException, OverflowError):
        return pa.nulls(n)
