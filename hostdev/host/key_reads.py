"""The keys that a table by key has, and reads of its whole columns in their order."""

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import KeyArrays
from hostdev.host.committed_keys import CommittedKeys
from hostdev.host.key_columns import OrderedColumn, columns_in_order
from hostdev.host.table import HostTable
from hostdev.kernels.key_parts import owners_of
from hostdev.kernels.norm import partial_squares

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]


class KeyedReads(HostTable):
    """The methods of a table by key that tell which keys it has, and that read all its rows."""

    @property
    def is_first(self) -> bool:
        """Whether this process has the out-of-vocabulary rows."""
        return self.part is None or self.part[0] == 0

    def owns(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which keys, int64 [N], this rank owns, bool [N]; they depend on the number of ranks only."""
        if self.part is None:
            return np.ones(len(keys), np.bool_)
        rank, ranks = self.part
        found: npt.NDArray[np.bool_] = owners_of(keys, ranks) == rank
        return found

    def committed(self) -> CommittedKeys:
        """Return the table's keys after its last finished step, with their rows."""
        raise NotImplementedError

    @property
    def unknown_rows(self) -> Mapping[str, int]:
        """The rows for keys without a row, by name, in the order of the names."""
        raise NotImplementedError

    @property
    def weights(self) -> Rows:
        """A copy of the weights, float32 [K, D], in the order of `keys`."""
        self._before_read()
        self._require_copies("weights", 1)
        return self._in_order("weights")

    @property
    def slots(self) -> Mapping[str, Rows]:
        """Copies of the optimizer state by name, each float32 [K, D], or [K, 1], in the order of `keys`."""
        self._before_read()
        self._require_copies("slots", len(self.optimizer.slots))
        return {name: self._in_order(name) for name in (*self.optimizer.slots, *self.optimizer.row_slots)}

    @property
    def row_slots(self) -> Rows:
        """A copy of the per-row state, float32 [K, R], in the order of `keys`."""
        self._before_read()
        return self.storage.row_slots[self.committed().rows]

    @property
    def block(self) -> NoReturn:
        """Raise TypeError: rows are in no order that has a meaning."""
        raise TypeError(f"table {self.name!r} is a table by key, whose rows have no order; use read_rows(keys, ...)")

    def _in_order(self, name: str) -> Rows:
        found = columns_in_order(self, self.committed().rows, after_all_steps=True)[name]
        return np.ascontiguousarray(found[:])

    def columns(self) -> dict[str, Any]:  # Any: see `HostTable.columns`
        """Return stored weights and optimizer state as `HostTable.columns` does, in the order of `keys`."""
        self._before_read()
        return dict(columns_in_order(self, self.committed().rows))

    def key_arrays(self) -> KeyArrays:
        """Return the keys for a digest."""
        self._before_read()
        found = self.committed()
        arrays = found.keys, found.last, found.uses, *found.waiting, found.sketch
        return KeyArrays(found.step, list(self.unknown_rows), *arrays)

    def stored_columns(self) -> Mapping[str, OrderedColumn]:
        """Return stored weights and optimizer state: the out-of-vocabulary rows by name, then the rows of `keys`."""
        self._before_read()
        rows = np.array(list(self.unknown_rows.values()), np.int32)
        return columns_in_order(self, np.concatenate([rows, self.committed().rows]))

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """Return the sums of squares of the weights, in the order of `keys`."""
        return partial_squares(np.ascontiguousarray(self.weights)[:, None])
