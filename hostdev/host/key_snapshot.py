"""A copy-on-write snapshot of a table by key, for checkpoints that are written during training.

Its positions 0 .. P - 1 stand for the out-of-vocabulary rows, in the order of their names, and then for the rows of the
snapshot's keys, in the order of the keys' hashes.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import KeyColumns
from hostdev.host.changes import Budget, Snapshot
from hostdev.host.key_index import CommittedKeys, order_of
from hostdev.host.storage import Storage
from hostdev.kernels.bits import empty_bits, mark

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[Any]
Keys = npt.NDArray[np.int64]


class KeySnapshot(Snapshot):
    """The rows of a table by key when the snapshot is constructed.

    Args:
        storage: The table's memory.
        budget: As for `Snapshot`.
        unknown: The out-of-vocabulary rows by name, in the order of the names.
        unknown_keys: int64 [U], the keys that stand for them.
        found: The table's keys, in any order.
        chosen: Positions among `found.keys` of the keys whose rows the snapshot has, or None for all.
        gone: int64 [G], keys that have lost their rows since the last snapshot.
    """

    def __init__(
        self,
        storage: Storage,
        budget: Budget,
        unknown: Mapping[str, int],
        unknown_keys: Keys,
        found: CommittedKeys,
        chosen: npt.NDArray[np.int64] | None,
        gone: Keys,
    ) -> None:
        self.found, self.gone, self.names = found, gone, list(unknown)
        self._own = np.array(list(unknown.values()), np.int32)
        self._own_keys, self._chosen = unknown_keys, chosen
        wanted = empty_bits(storage.shape[0])
        mark(self._own, wanted)
        mark(found.rows if chosen is None else found.rows[chosen], wanted)
        super().__init__(storage, wanted, budget)
        self._rows = self.count
        self._bucket = -(-self.count // 32)

    @cached_property
    def _order(self) -> tuple[npt.NDArray[np.int32], KeyColumns]:
        """The row of each position, and the keys; sorted by the thread that writes, as that takes time."""
        found, chosen = self.found, slice(None) if self._chosen is None else self._chosen
        keys = found.keys[chosen]
        order = order_of(keys)
        none = np.zeros(len(self._own), np.uint32)
        columns = KeyColumns(
            np.concatenate([self._own_keys, keys[order]]),
            np.concatenate([none, found.last[chosen][order]]),
            np.concatenate([none, found.uses[chosen][order]]),
        )
        return np.concatenate([self._own, found.rows[chosen][order]]), columns

    @cached_property
    def _positions(self) -> npt.NDArray[np.int32]:
        """The position of each row; undefined for other rows."""
        rows = self._order[0]
        found = np.empty(int(rows.max(initial=0)) + 1, np.int32)
        found[rows] = np.arange(len(rows), dtype=np.int32)
        return found

    def key_columns(self, first: int, last: int) -> KeyColumns:
        """Return the keys at the positions [first, last)."""
        return self._order[1].at(slice(first, last))

    def rows_between(self, first: int, last: int) -> Ids:
        """Return the positions [first, last), int64."""
        return np.arange(first, last)

    def _rows_at(self, positions: Ids) -> Ids:
        return self._order[0][positions]

    def _positions_of(self, rows: Ids) -> Ids:
        return self._positions[rows]

    def end(self) -> None:
        """See `Snapshot.end`."""
        super().end()
        self.found, self._chosen = self.found._replace(keys=self.found.keys[:0]), None


def gone_since(keys: Sequence[Keys]) -> Keys:
    """Return distinct keys of several arrays, in the order of their hashes."""
    found = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]))
    return found[order_of(found)]
