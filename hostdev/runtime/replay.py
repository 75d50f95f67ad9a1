"""Requests that can be read again: the pipeline reads ahead, and may have to begin again after the last batch taken."""

import threading
from collections import deque
from collections.abc import Iterator

from hostdev.pipeline.batch_ids import Request


class Replay(Iterator[Request]):
    """An iterator over requests, which keeps those whose batch was not taken yet. Several threads may use it.

    Args:
        source: The requests.
    """

    def __init__(self, source: Iterator[Request]) -> None:
        self._source = source
        self._read: deque[Request] = deque()  # read, but not taken
        self._again: deque[Request] = deque()  # to be read again
        self._rewound = 0
        self._reading = threading.Lock()  # held while the source is read, by a thread of a pass that may be over
        self._changing = threading.Lock()

    def __next__(self) -> Request:
        rewound = self._rewound
        with self._reading:
            with self._changing:
                found = self._again.popleft() if self._again and rewound == self._rewound else None
                if found is not None:
                    self._read.append(found)
                    return found
            request = next(self._source)
            with self._changing:
                (self._read if rewound == self._rewound else self._again).append(request)
            return request

    def take(self) -> None:
        """Forget the first request that was read, whose batch was taken."""
        with self._changing:
            self._read.popleft()

    def rewind(self) -> None:
        """Read the requests again whose batches were not taken."""
        with self._changing:
            self._again.extendleft(reversed(self._read))
            self._read.clear()
            self._rewound += 1
