"""Bounds on the decoded size of a Parquet file's texts, which a dictionary can hide."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hostdev.data.preprocess import columns as arrow

MOST_BYTES = 1 << 27  # maximum text in rows decoded together
_LARGE = 1 << 13  # bytes; columns with smaller chunks do not limit the rows


def rows_for_text(path: Path, group: int, columns: Sequence[Any], rows: int) -> int:
    """Return how many rows of a row group, at most `rows`, may be decoded together within MOST_BYTES of text.

    `columns` has the metadata of the group's columns that are read.
    """
    doubtful = [
        one.path_in_schema
        for one in columns
        if one.has_dictionary_page and one.physical_type == "BYTE_ARRAY" and one.total_uncompressed_size > _LARGE
    ]
    if not doubtful:
        return rows
    longest = 0
    with pa.OSFile(os.fsencode(path)) as source, pq.ParquetFile(source, read_dictionary=doubtful) as file:
        names = sorted({name.partition(".")[0] for name in doubtful})
        for batch in file.iter_batches(1, row_groups=[group], columns=names):
            longest = sum(map(_longest, batch.columns))
            break
    return max(1, min(rows, MOST_BYTES // max(1, longest)))


def _longest(column: Any) -> int:
    """Return the bytes of the longest text in a column's dictionary; 0 if there is none."""
    values = column
    while pa.types.is_nested(values.type) and hasattr(values, "values"):
        values = values.values
    if not pa.types.is_dictionary(values.type) or not len(values.dictionary):
        return 0
    return int(np.max(arrow.text_lengths(values.dictionary), initial=0))
