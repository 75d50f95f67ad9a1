"""state_sha256: a digest of everything that training has learned. Equal digests mean equal models.

It covers the tables in order of their names, then the arrays of the dense part. A table contributes a line with its
name and number of steps, its weights, and its slots in order of their names. A line with name, dtype and shape precedes
each array. Arrays are row-major and little-endian.
"""

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from hostdev.core.workers import Workers

PIECE_BYTES = 1 << 24


class Column(NamedTuple):
    """An array of a table: its name, its shape, and a function that yields its rows in float32, C-contiguous chunks."""

    name: str
    shape: tuple[int, int]
    pieces: Callable[[], Iterable[Any]]


class StateDigest:
    """The SHA-256 that the module describes; a thread fetches the next chunk while one is hashed."""

    def __init__(self) -> None:
        self._digest = sha256()

    def table(self, name: str, step: int, weights: Column, slots: Iterable[Column]) -> None:
        """Add a table; tables are added in order of their names."""
        self._digest.update(f"table {name} step {step}\n".encode())
        for column in (weights, *sorted(slots, key=lambda column: column.name)):
            self.array(f"{name}/{column.name}", "float32", column.shape, column.pieces())

    def array(self, name: str, dtype: str, shape: Iterable[int], pieces: Iterable[Any]) -> None:
        """Add an array in chunks."""
        self._digest.update(f"{name} {dtype} {list(shape)}\n".encode())
        for piece in _one_ahead(iter(pieces)):
            self._digest.update(np.ascontiguousarray(piece).data)

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()


def pieces_of(rows: Any, fetch: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield rows [n, ...] in non-empty chunks of a few MiB, each as `fetch` returns it."""
    step = max(1, PIECE_BYTES // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), step):
        yield fetch(rows[start : start + step])


def _one_ahead(pieces: Iterator[Any]) -> Iterator[Any]:
    """Yield chunks while another thread fetches the next one."""
    first = next(pieces, None)
    if first is None:
        return
    second = next(pieces, None)
    if second is None:
        yield first
        return
    with Workers(1, "hostdev-digest") as pool:
        yield first
        while second is not None:
            coming = pool.submit(lambda: next(pieces, None))
            yield second
            second = coming.result()
