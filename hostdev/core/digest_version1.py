"""`state_sha256` of checkpoints in format version 1: the SHA-256 of all bytes in one stream."""

from collections.abc import Sequence
from hashlib import sha256

from hostdev.core.digest import Column, RangeDigests, StateDigest, in_order, rows_per_range
from hostdev.core.keys import KeyArrays


class StateDigest1(StateDigest):
    """The digest of format version 1: it has no first line, and hashes columns' bytes instead of ranges' digests.

    It is computed in the calling thread.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._digest = sha256()

    def table(
        self,
        name: str,
        step: int,
        columns: Sequence[Column],
        known: RangeDigests | None = None,
        keys: KeyArrays | None = None,
    ) -> None:
        """Add a table; `known` is ignored, and version 1 has no tables by key."""
        del known
        assert keys is None
        self._digest.update(f"table {name} step {step}\n".encode())
        ranges = -(-columns[0].shape[0] // rows_per_range(columns[0].shape[1]))
        for column in in_order(columns):
            pieces = (fetch() for fetch in column.ranges(range(ranges)))
            self.array(f"{name}/{column.name}", "float32", column.shape, pieces)
