"""`state_sha256` of checkpoints of format version 1: the SHA-256 of one stream of all bytes."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from hostdev.core.digest import Column, RangeDigests, rows_per_range


class StateDigest1:
    """The digest of version 1, with the methods of `StateDigest`.

    The tables come in order of their names, each with a line with its name and number of steps, its weights, and its
    optimizer state in order of names; then the arrays of the dense part. A line with name, dtype and shape precedes the
    bytes of each array.
    """

    def __init__(self) -> None:
        self._digest = sha256()

    def table(self, name: str, step: int, columns: Sequence[Column], known: RangeDigests | None = None) -> None:
        """Add a table; `known` has no use."""
        del known
        self._digest.update(f"table {name} step {step}\n".encode())
        weights, *slots = columns
        ranges = -(-weights.shape[0] // rows_per_range(weights.shape[1]))
        for column in (weights, *sorted(slots, key=lambda column: column.name)):
            self.array(
                f"{name}/{column.name}", "float32", column.shape, (fetch() for fetch in column.ranges(range(ranges)))
            )

    def array(self, name: str, dtype: str, shape: Iterable[int], pieces: Iterable[Any]) -> None:
        """Add an array in chunks."""
        self._digest.update(f"{name} {dtype} {list(shape)}\n".encode())
        for piece in pieces:
            self._digest.update(np.ascontiguousarray(piece).data)

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()
