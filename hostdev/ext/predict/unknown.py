"""Warnings about columns with far more out-of-vocabulary values than in training, a sign of a different format."""

from collections.abc import Iterator

import numpy as np

from hostdev.data.batch import Batch
from hostdev.data.preprocess.encoding import Encoding

_SOME = 20  # columns with fewer values are not reported
_MOST = 0.5  # a share of unknown values above this is reported
_TIMES = 2  # if it is also above this many times the share in training


class UnknownValues:
    """Counts out-of-vocabulary values by column, and warns once per column if there are far more than in training.

    Several threads may count without a lock; small counting errors do not matter.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding, schema = encoding, encoding.schema
        spaces = {space.name: space for space in schema.spaces}
        ids = [column for column in schema.columns if column.kind == "id"]
        self._columns = [*ids, *(column for column in schema.columns if column.kind == "bag")]
        self._oov = np.array([spaces[column.space].oov for column in self._columns], np.int64)
        self._rates = np.array([encoding.rates.get(column.space, 1.0) for column in self._columns])
        self._most = np.maximum(_MOST, _TIMES * self._rates)  # a larger share causes a warning
        self._ids = len(ids)
        self._uses = np.zeros(len(self._columns), np.int64)
        self._unknown = np.zeros(len(self._columns), np.int64)
        self._warned: set[str] = set()

    def count(self, batch: Batch) -> None:
        """Count the values of a batch."""
        if not self._encoding.rates:
            return
        self._uses[: self._ids] += len(batch)
        self._unknown[: self._ids] += np.count_nonzero(batch.ids == self._oov[: self._ids], axis=0)
        for place, column in enumerate(self._columns[self._ids :], self._ids):
            values, _ = batch.bags[column.name]
            self._uses[place] += len(values)
            self._unknown[place] += np.count_nonzero(values == self._oov[place])

    def lines(self) -> Iterator[str]:
        """Yield a warning for each column that needs one and has not been reported before."""
        for place in np.flatnonzero((self._uses >= _SOME) & (self._unknown > self._most * self._uses)).tolist():
            column, uses = self._columns[place], int(self._uses[place])
            if column.name in self._warned:
                continue
            self._warned.add(column.name)
            share, before = self._unknown[place] / uses, self._rates[place]
            shown = self._encoding.written(column.space).shown
            yield (
                f"column {column.name!r}: {share:.1%} of {uses:,} values are out of vocabulary, but only {before:.1%} "
                f"were in training, where values were {shown}; are these values written the same way?"
            )
