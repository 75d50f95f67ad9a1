"""Background threads that open shards, and compute the order of their rows, before the rows are needed."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any

from hostdev.core.workers import Workers
from hostdev.data.order import Window
from hostdev.data.rows import Piece, Rows

_THREADS = 2
_AHEAD = 2  # open whole windows in advance until they have at least this many shards


def opened(
    windows: Sequence[Window], open_shard: Callable[[int, threading.Event], list[Piece]]
) -> Generator[Rows, None, None]:
    """Yield the rows of each window. Meanwhile, threads open the next windows, until two or more shards are open.

    Each open shard maps one file and, if shuffled, needs 8 bytes per row for the order of its rows (16 while this order
    is computed). Closing the iterator ends the threads.

    Args:
        open_shard: Called with a shard's number and an event that is set when the iterator is closed. If it fails, its
            error is raised when the shard's window is due.
    """
    if len(windows) == 1 and len(windows[0].shards) == 1:
        [window] = windows
        yield Rows(open_shard(window.shards[0], threading.Event()), window.order())
        return
    stop = threading.Event()
    coming: deque[tuple[list[Future[list[Piece]]], Future[Any]]] = deque()
    left = deque(windows)
    with Workers(_THREADS, "hostdev-shards") as workers:
        try:
            while left or coming:
                while left and (not coming or sum(len(shards) for shards, _ in islice(coming, 1, None)) < _AHEAD):
                    window = left.popleft()
                    order = workers.submit(window.order)
                    coming.append(([workers.submit(partial(open_shard, each, stop)) for each in window.shards], order))
                shards, order = coming.popleft()
                yield Rows([piece for shard in shards for piece in shard.result()], order.result())
        finally:
            stop.set()
