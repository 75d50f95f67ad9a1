"""The distinct values of an id space with their occurrences, numbered in order of first occurrence."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.data.preprocess import columns as arrow
from hostdev.kernels.arrays import LongIds
from hostdev.kernels.strings import Dictionary, TextMap

FormatKeys = Callable[[LongIds], pa.Array]
DIGITS = 20  # maximum number of characters of an integer


def make_values(format_keys: FormatKeys | None) -> "IntegerValues | TextValues":
    """Return an empty collection: of integers if `format_keys` returns their texts, of texts if it is None."""
    return TextValues() if format_keys is None else IntegerValues(format_keys)


class IntegerValues:
    """The integer values of an id space."""

    def __init__(self, format_keys: FormatKeys) -> None:
        self._seen, self._format_keys = Dictionary(), format_keys

    @property
    def uses(self) -> LongIds:
        """Occurrences of each value, in order of first occurrence."""
        return self._seen.uses

    def count(self, keys: LongIds, uses: npt.NDArray[Any]) -> None:
        """Add the occurrences `uses` [N] of distinct values."""
        self._seen.count(keys, uses)

    def find(self, keys: LongIds) -> LongIds:
        """Return the index of each value, int64 [N]; -1 for an unknown one."""
        return self._seen.find(keys)

    def texts(self, numbers: LongIds) -> pa.Array:
        """Return the values at these indices as text."""
        return self._format_keys(self._seen.keys[numbers])

    def keys(self, numbers: LongIds) -> LongIds:
        """Return the values at these indices."""
        return self._seen.keys[numbers]

    def lengths(self, numbers: LongIds) -> LongIds:
        """Return an upper bound on the number of bytes of each value's text."""
        return np.full(len(numbers), DIGITS)


class TextValues:
    """The text values of an id space."""

    def __init__(self) -> None:
        self._seen = TextMap()
        self._uses = np.zeros(1024, np.int64)

    @property
    def uses(self) -> LongIds:
        """Occurrences of each value, in order of first occurrence."""
        return self._uses[: len(self._seen)]

    def count(self, keys: pa.LargeStringArray, uses: npt.NDArray[Any]) -> None:
        """Add the occurrences `uses` [N] of distinct values."""
        positions = self._seen.add(*arrow.get_buffers(keys))
        if len(self._seen) > len(self._uses):
            self._uses.resize(len(self._seen) + len(self._seen) // 4, refcheck=False)
        self._uses[positions] += uses  # positions are distinct

    def find(self, keys: pa.LargeStringArray) -> LongIds:
        """Return the index of each value, int64 [N]; -1 for an unknown one."""
        return self._seen.find(*arrow.get_buffers(keys)).astype(np.int64)

    def texts(self, numbers: LongIds) -> pa.Array:
        """Return the values at these indices, which must have less than 2 GiB of text."""
        return arrow.make_texts(*self._seen.take(numbers)).cast(pa.string())

    def keys(self, numbers: LongIds) -> pa.LargeStringArray:
        """Return the values at these indices."""
        return arrow.make_texts(*self._seen.take(numbers))

    def lengths(self, numbers: LongIds) -> LongIds:
        """Return the number of bytes of each value."""
        return self._seen.lengths(numbers)
