"""Writes the predictions to Parquet or CSV: a line for each input line, with columns copied from the input."""

import itertools
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
from hostdev.data.preprocess.unlabelled import EncodedPart
from hostdev.data.schema import Schema, columns_of
from hostdev.ext.predict.predictor import probabilities
from hostdev.kernels.arrays import Values


def names_of(schema: Schema) -> list[tuple[str, str]]:
    """Return a pair of column names for each label: the columns with its predictions and with its values."""
    kinds = ["prediction" if name in schema.targets.numeric else "probability" for name in schema.labels]
    if not schema.targets.more:
        return [(kinds[0], "label")]
    return [(f"{kind}_{name}", f"label_{name}") for kind, name in zip(kinds, schema.labels, strict=True)]


def kept_columns(text: str | None, schema: Schema) -> list[str]:
    """Parse the comma-separated names of --keep; raise UserError for duplicates and for the output's own columns."""
    names = list(parse_names(None if text is None else [text]))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--keep names {twice[0]!r} twice; name it once")
    if own := [name for name in names if name in itertools.chain(*names_of(schema))]:
        raise UserError(f"--keep {own[0]}: the predictions have a column of that name; rename the column in the file")
    return names


class Output:
    """Writes predictions part by part.

    Args:
        path: The new file.
        schema: The data set's schema; its labels determine the names of the columns.
        is_csv: Whether to write CSV instead of Parquet.
        more: Names of the columns to copy from the input.
    """

    def __init__(self, path: Path, schema: Schema, *, is_csv: bool, more: list[str]) -> None:
        self._file = pa.OSFile(os.fsencode(path), "wb")
        self._is_csv, self._more = is_csv, more
        self._names, self._numeric = names_of(schema), [name in schema.targets.numeric for name in schema.labels]
        self._writer: Any = None  # for Parquet or CSV, made with the first rows, which determine the types

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._writer is None:  # without rows, too, the file gets its columns
                fields = [
                    *((name, pa.float32()) for names in self._names for name in names),
                    *((name, pa.string()) for name in self._more),
                ]
                self._open(pa.schema(fields))
            if self._writer is not None:
                self._writer.close()
        finally:
            self._file.close()

    def write(self, outputs: Values, part: EncodedPart) -> None:
        """Write the predictions and labels of a part's lines; null for malformed lines and missing labels.

        `outputs` has the model's outputs for the part's rows, float32 [n] or [n, labels].
        """
        table = self._table(outputs, part)
        if part.more is not None:
            for name in self._more:
                table = table.append_column(name, [_flat(part.more[name]) if self._is_csv else part.more[name]])
        writer = self._writer if self._writer is not None else self._open(table.schema)
        writer.write_table(table)

    def _table(self, outputs: Values, part: EncodedPart) -> pa.Table:
        columns: dict[str, pa.Array] = {}
        each = zip(self._names, self._numeric, columns_of(outputs), columns_of(part.batch.label), strict=True)
        for (name, label_name), is_number, output, label in each:
            columns[name] = _column(output if is_number else probabilities(output), ~np.isfinite(output), part)
            columns[label_name] = _column(label, np.isnan(label), part)
        return pa.table(columns)

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


def _column(values: Values, missing: npt.NDArray[np.bool_], part: EncodedPart) -> pa.Array:
    """Return a column with one value per line of a part, from the values of its rows [n]; other lines are null."""
    if part.places is None:
        return pa.array(values, mask=missing)
    whole, nulls = np.zeros(part.lines, np.float32), np.ones(part.lines, np.bool_)
    whole[part.places], nulls[part.places] = values, missing
    return pa.array(whole, mask=nulls)
