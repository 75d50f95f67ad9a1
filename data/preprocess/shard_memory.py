"""Memory estimate for writing shards: each thread holds the rows of one shard."""

from collections.abc import Sequence

import numpy as np

from hostdev.core.errors import TransientError
from hostdev.core.memory import available_bytes, format_bytes
from hostdev.data.preprocess.pieces import Facts
from hostdev.data.preprocess.raw import SourceLayout

_OVERHEAD = 16 << 20  # bytes per thread, besides rows
_NUMBER_BYTES = 24  # per number of a piece during scaling: three float64 copies


class ShardMemory:
    """Estimates the memory for writing the shards of all rows added so far.

    Args:
        threads: Number of threads; each writes one shard at a time.
        splits: Number of splits.
        free: Bytes of memory for all threads; None for what is free on this machine.
    """

    def __init__(
        self,
        layout: SourceLayout,
        rows_per_shard: int,
        threads: int,
        id_type: str,
        splits: int,
        free: int | None = None,
    ) -> None:
        self._free = free
        self._layout, self._most, self._threads = layout, rows_per_shard, threads
        self._id_bytes = np.dtype(id_type).itemsize
        self._rows, self._values, self._piece_rows = [0] * splits, [0] * splits, 0

    def add_pieces(self, facts: Sequence[Facts]) -> None:
        """Add the rows of pieces.

        Raises TransientError unless all shards that are written concurrently fit into free memory.
        """
        for i in range(len(self._rows)):
            self._rows[i] += sum(fact.rows[i] for fact in facts)
            self._values[i] += sum(sum(fact.bag_values[i]) for fact in facts)
        self._piece_rows = max([self._piece_rows, *(sum(fact.rows) for fact in facts)])
        shard, threads, rows = max(map(self._shard, range(len(self._rows))), key=lambda found: found[0] * found[1])
        free = available_bytes() if self._free is None else self._free
        if threads * shard > free:
            held = "a thread would hold" if threads == 1 else f"{threads} threads would each hold"
            fewer = "" if threads == 1 else ", or fewer --threads"
            raise TransientError(
                f"{held} a shard of {rows:,} rows, {format_bytes(shard)}, but {format_bytes(free)} of memory are free; "
                f"give a smaller --rows-per-shard{fewer}"
            )

    def _shard(self, split: int) -> tuple[int, int, int]:
        """Return the estimated bytes of a split's shard, the number of concurrent shards, and the rows per shard.

        A bag's values are held twice: by piece and concatenated. Counting out-of-vocabulary ids takes a byte per id.
        """
        rows = min(self._rows[split], self._most)
        if rows == 0:
            return 0, 0, 0
        ids, numbers, bags = len(self._layout.ids), len(self._layout.dense), len(self._layout.bags)
        each = 4 + 4 * numbers + (self._id_bytes + 1) * ids + 16 * bags
        values = self._values[split] * rows // self._rows[split]
        piece_bytes = _NUMBER_BYTES * numbers * self._piece_rows
        threads = min(self._threads, -(-self._rows[split] // rows))
        each_value = 2 * self._id_bytes + (8 if any(bag.weighted for bag in self._layout.bags) else 0)
        return rows * each + each_value * values + piece_bytes + _OVERHEAD, threads, rows
