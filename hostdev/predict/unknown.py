"""Columns of which far more is out of vocabulary than in training: they may be written in another way."""

from collections.abc import Iterator

import numpy as np

from hostdev.data.batch import Batch
from hostdev.data.preprocess.encoding import Encoding

_SOME = 20  # values, from which on a share says something
_MOST = 0.5  # of them out of vocabulary, and
_TIMES = 2  # as large a share as in training


class UnknownValues:
    """Counts what is out of vocabulary, by column; once for each column it says that this is far more than in training.

    Several threads may count; what one of them misses is of no account.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding, self._schema = encoding, encoding.schema
        self._spaces = {space.name: space for space in self._schema.spaces}
        self._uses = dict.fromkeys((column.name for column in self._schema.columns), 0)
        self._unknown, self._told = dict(self._uses), set[str]()

    def take_in(self, batch: Batch) -> None:
        """Count a batch."""
        if not self._encoding.rates:
            return
        for place, name in enumerate(self._schema.ids):
            self._take_in(name, batch.ids[:, place])
        for name, (values, _) in batch.bags.items():
            self._take_in(name, values)

    def _take_in(self, name: str, ids: "np.ndarray[tuple[int, ...], np.dtype[np.integer]]") -> None:
        column = next(column for column in self._schema.columns if column.name == name)
        self._uses[name] += len(ids)
        self._unknown[name] += int(np.count_nonzero(ids == self._spaces[column.space].oov))

    def lines(self) -> Iterator[str]:
        """Yield a line for each column that deserves one, and had none yet."""
        for column in self._schema.columns:
            name, uses = column.name, self._uses[column.name]
            share, before = self._unknown[name] / max(1, uses), self._encoding.rates.get(column.space, 1.0)
            if name in self._told or uses < _SOME or share <= _MOST or share <= _TIMES * before:
                continue
            self._told.add(name)
            shown = self._encoding.written(column.space).shown
            yield (f"column {name!r}: {share:.1%} of {uses:,} values are out of vocabulary, and {before:.1%} were in "
                   f"training, whose values were {shown}; are they written in the same way?")  # fmt: skip
