"""Reports of evicted keys to the functions that a program gave to `on_evict`."""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Keys, Rows
from hostdev.kernels.key_order import order_of


class EvictionReports:
    """Evictions that were not reported yet, and the functions to which they are reported."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Keys, Rows], object]] = []
        self._waiting: deque[tuple[Keys, Rows]] = deque()

    def __bool__(self) -> bool:
        """Return whether anybody listens."""
        return bool(self.listeners)

    def add(self, keys: Keys, weights: Callable[[npt.NDArray[np.int64]], Rows]) -> None:
        """Note an eviction: keys [E], and a function that returns the weights of these positions, [E, D]."""
        if len(keys) and self.listeners:
            order = order_of(keys)
            self._waiting.append((keys[order], weights(order)))

    def send(self) -> None:
        """Call the listeners for each eviction that was not reported yet."""
        while self._waiting:
            keys, weights = self._waiting.popleft()
            for listener in self.listeners:
                listener(keys, weights)
