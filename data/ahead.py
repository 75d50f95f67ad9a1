"""Windows of shards, opened and put in order by threads ahead of who takes their rows."""

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
_AHEAD = 2  # shards, or one window where it has more


def opened(
    windows: Sequence[Window], open_shard: Callable[[int, threading.Event], list[Piece]]
) -> Generator[Rows, None, None]:
    """Yield the rows of each window; the next shards are opened meanwhile.

    Beside the window that was yielded, two shards are open, or one window of more: mapped files, and 8 bytes for each
    of their rows, its place in the order; 16 while it is sorted. Closing the iterator ends its threads.

    open_shard  called with a shard's number, and what is set at the end; its error is raised where the window's turn is
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
