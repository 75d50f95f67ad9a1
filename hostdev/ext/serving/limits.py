"""Limits of requests: of bytes, rows, and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np

from hostdev.ext.serving.columns import Columns, RawColumn
from hostdev.ext.serving.refused import RefusedError

_VALUES_PER_ROW = 32  # in lists, on average over the largest number of rows
_CONTAINERS_PER_ROW = 16
_MOST_ROW_VALUES = 1 << 18
_LEAST = 1 << 16  # rows for which values are accepted in any case


def values_of(rows: int) -> int:
    """Return the largest number of values in the lists and separated texts of this many rows."""
    return _VALUES_PER_ROW * max(_LEAST, rows)


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
        most_bytes: Of a body.
        most_rows: Of a request.
        body_seconds: For a body to arrive.
    """

    most_bytes: int
    most_rows: int
    body_seconds: float

    @property
    def most_containers(self) -> int:
        """The largest number of JSON objects and lists in a body."""
        return _CONTAINERS_PER_ROW * max(_LEAST, self.most_rows)

    @property
    def most_values(self) -> int:
        """The largest number of values in the lists and separated texts of a request."""
        return values_of(self.most_rows)

    def require_few(self, what: str, values: int, most: int = 0) -> None:
        """Raise RefusedError if there are more values than `most_values`, and than `most`."""
        if values > max(most, self.most_values):
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{what} has {values:,} values in lists, more than {self.most_values:,}; send its rows in several "
                "requests",
            )

    def count_values(self, columns: Columns, inputs: Mapping[str, RawColumn]) -> int:
        """Return the number of values in the lists and separated texts of a request's columns.

        Raises:
            RefusedError: They are too many, in a row or in all. A vector may have as many as the model demands.
        """
        values = most = 0
        for name, about in inputs.items():
            if not about.has_lists:
                continue
            counts = _lengths(columns[name], about)
            longest = max(counts, default=0)
            if longest > max(_MOST_ROW_VALUES, about.shape[-1]):
                raise RefusedError(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"row {counts.index(longest) + 1}, column {name!r} has {longest:,} values, more than "
                    f"{_MOST_ROW_VALUES:,}",
                )
            values += sum(counts)
            most += max(0, about.shape[-1]) * len(counts)
        self.require_few("the request", values, most)
        return values


def _lengths(values: Any, about: RawColumn) -> list[int]:
    """Return the number of values in each row."""
    if isinstance(values, np.ndarray):
        return [values.size // max(1, len(values))] * len(values)
    return [_length(value, about.separator) for value in values]


def _length(value: Any, separator: str | None) -> int:
    if isinstance(value, str):
        return value.count(separator) + 1 if separator else 1
    return len(value) if isinstance(value, list) else 1
