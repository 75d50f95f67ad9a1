"""Encoding of rows that are plain Python values, which takes less time than Arrow's way for up to thousands of rows.

It finds the same ids and numbers as `Encoding.encode`, and leaves to it what it does not know.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.data import ragged
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.dense import LARGEST
from hostdev.data.preprocess.forms import Written
from hostdev.data.preprocess.known import Vocabulary
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.kernels.strings import hash_texts

Ids = npt.NDArray[np.int64]

_PLAIN_INTEGER = re.compile("0|-?[1-9][0-9]{0,17}", re.ASCII)
_NONE = type(None)


class IdColumn(NamedTuple):
    """A column with one id per row.

    Attributes:
        source: The name of the file's column.
        space: The name of its id space.
        oov: The id of unknown values.
        written: How its values were written in training.
        is_trimmed: Whether texts lose whitespace at their ends.
    """

    source: str
    space: str
    oov: int
    written: Written
    is_trimmed: bool


class PlainRows:
    """Encodes rows whose ids are text or integers.

    Attributes:
        names: The columns that are read.

    Args:
        numbers: The names of the files' columns with the numbers, in order.
        columns: The columns with ids, in order.
        known: The mapping from values to ids.
        is_criteo: Whether ids are Criteo's hexadecimal digits.
    """

    def __init__(
        self,
        numbers: Sequence[str],
        columns: Sequence[IdColumn],
        known: Vocabulary | HashBuckets,
        *,
        is_criteo: bool,
    ) -> None:
        self._numbers, self._columns, self._known, self._is_criteo = numbers, columns, known, is_criteo
        self.names = list(dict.fromkeys([*numbers, *(column.source for column in columns)]))
        self._oov = np.array([column.oov for column in columns], np.int64)[:, None]

    def read(self, rows: Mapping[str, Sequence[Any]], n: int) -> tuple[npt.NDArray[np.float64], Ids] | None:
        """Return n rows' numbers, float64 [n, numbers], with NaN for missing ones, and ids, [n, columns].

        The result is None if only `Encoding.encode` can read them.
        """
        numbers = [value for name in self._numbers for value in rows[name]]
        kinds = set(map(type, numbers))
        if not kinds <= {int, float, _NONE}:
            return None
        try:
            found = np.array(numbers, np.float64).reshape(len(self._numbers), n).T  # None becomes NaN
        except OverflowError:
            return None
        if int in kinds and (np.abs(found) >= LARGEST).any():
            return None
        texts: list[str] = []
        for column in self._columns:
            some = self._texts(column, rows[column.source])
            if some is None:
                return None
            texts += some
        ids = self._find(texts, n)
        return None if ids is None else (found, ids)

    def _texts(self, column: IdColumn, values: Sequence[Any]) -> Sequence[str] | None:
        """Return the texts that values had in training, or None if only `encode` can read them."""
        kinds, written = set(map(type, values)), column.written
        if column.is_trimmed and not _have_plain_ends(values):
            return None
        if kinds == {str}:
            return values
        if (
            not kinds <= {str, int, _NONE}
            or (int in kinds and not written.has_plain_integers)
            or (_NONE in kinds and written.missing is None)
        ):
            return None
        return [
            value if type(value) is str else written.missing if value is None else str(value)  # type: ignore[misc]
            for value in values
        ]

    def _find(self, texts: list[str], n: int) -> Ids | None:
        """Return the ids of n texts per column, [n, columns], or None if only `encode` can find them."""
        try:
            if isinstance(self._known, HashBuckets):
                return self._hash(self._known, texts, n)
            texts = [text.lower() for text in texts] if self._is_criteo else texts
            ids = self._known.find_few([column.space for column in self._columns], texts).reshape(-1, n)
        except UnicodeEncodeError:
            return None
        is_unknown = ids < 0
        some = np.flatnonzero(is_unknown.any(axis=1)).tolist()
        if any(self._columns[i].written.kind not in ("text", "unknown") for i in some):
            return None  # they may have been written differently in training
        return np.where(is_unknown, self._oov, ids).T

    def _hash(self, known: HashBuckets, texts: list[str], n: int) -> Ids | None:
        """Do the work of `_find` for a data set whose ids are hash buckets."""
        if self._is_criteo:
            found = criteo.hex_keys(texts)
            if found is None:
                return None
            keys = found
        else:
            for i, column in enumerate(self._columns):
                if _may_be_reformatted(column.written, texts[i * n : (i + 1) * n]):
                    return None
            encoded = [text.encode() for text in texts]
            offsets = ragged.offsets_of(np.fromiter(map(len, encoded), np.int64, len(encoded)))
            keys = hash_texts(offsets, np.frombuffer(b"".join(encoded), np.uint8)).view(np.int64)
        missing = [0] * len(self._columns)  # which values are missing does not matter here
        ids, _ = known.encode(keys.reshape(-1, n).T, np.arange(n), missing)
        return ids


def _may_be_reformatted(written: Written, texts: Sequence[str]) -> bool:
    """Return whether training may have hashed different texts for these values."""
    if written.kind == "number" and written.has_plain_integers:
        return any(_PLAIN_INTEGER.fullmatch(text) is None for text in texts)
    return written.kind not in ("text", "unknown")


def _have_plain_ends(values: Sequence[Any]) -> bool:
    """Return whether texts certainly neither begin nor end with whitespace."""
    texts = [value for value in values if type(value) is str and value]
    letters = {text[0] for text in texts} | {text[-1] for text in texts}
    return all(" " < letter <= "~" or letter.isalnum() for letter in letters)
