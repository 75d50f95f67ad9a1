"""Writer of the predictions file: Parquet or CSV, with a line for each input row, and columns kept from the input."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from hostdev.core.errors import UserError
from hostdev.data.preprocess.naming import parse_names
from hostdev.data.preprocess.unlabelled import Part
from hostdev.predict.predictor import probabilities

NAMES = ("probability", "label")


def kept_columns(text: str | None) -> list[str]:
    """Parse the comma-separated names of --keep; raise UserError for duplicates and for names in NAMES."""
    names = list(parse_names(None if text is None else [text]))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--keep names {twice[0]!r} twice; name it once")
    if own := [name for name in names if name in NAMES]:
        raise UserError(f"--keep {own[0]}: the predictions have a column of that name; rename the column in the file")
    return names


class Output:
    """Writes predictions part by part.

    Args:
        path: The new file.
        is_csv: Whether to write CSV instead of Parquet.
        more: Columns kept from the input.
    """

    def __init__(self, path: Path, *, is_csv: bool, more: list[str]) -> None:
        self._file = pa.OSFile(os.fsencode(path), "wb")
        self._is_csv, self._more = is_csv, more
        self._writer: Any = None  # for Parquet or CSV, made with the first rows, which determine the types

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._writer is None:  # no rows
                fields = [*((name, pa.float32()) for name in NAMES), *((name, pa.string()) for name in self._more)]
                self._open(pa.schema(fields))
            if self._writer is not None:
                self._writer.close()
        finally:
            self._file.close()

    def write(self, logits: npt.NDArray[np.float32], part: Part) -> None:
        """Write the probabilities and labels of a part's lines; null for malformed lines and missing labels."""
        table = _table(logits, part)
        if part.more is not None:
            for name in self._more:
                table = table.append_column(name, [_flat(part.more[name]) if self._is_csv else part.more[name]])
        writer = self._writer if self._writer is not None else self._open(table.schema)
        writer.write_table(table)

    def _open(self, schema: pa.Schema) -> Any:
        make = arrow_csv.CSVWriter if self._is_csv else pq.ParquetWriter
        self._writer = make(self._file, schema)
        return self._writer


def _flat(column: pa.Array) -> pa.Array:
    """Return a column in a form that CSV can hold: lists become text, with values separated by |."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not pa.types.is_nested(column.type):
        return column
    texts = (None if one is None else "|".join(map(str, one)) for one in column.to_pylist())
    return pa.array(list(texts), pa.string())


def _table(logits: npt.NDArray[np.float32], part: Part) -> pa.Table:
    probability, none = probabilities(logits), ~np.isfinite(logits)
    label = part.batch.label
    missing = np.isnan(label)
    if part.places is not None:
        columns = []
        for values, without in ((probability, none), (label, missing)):
            whole, nulls = np.zeros(part.lines, np.float32), np.ones(part.lines, np.bool_)
            whole[part.places], nulls[part.places] = values, without
            columns.append(pa.array(whole, mask=nulls))
    else:
        columns = [pa.array(probability, mask=none), pa.array(label, mask=missing)]
    return pa.table(columns, names=list(NAMES))
