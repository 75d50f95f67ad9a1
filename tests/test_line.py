"""What the threads of a pipeline share."""

import threading
import time
from typing import Any, cast

from hostdev.pipeline.line import Line


class _Slow:
    """A batch that is looked at for long enough that another thread comes between."""

    @property
    def late(self) -> list[Any]:
        time.sleep(0.0005)
        return []


def test_the_line_is_walked_while_others_change_it():
    line = Line(2, 0, 0, update=True)
    flights = cast(dict[int, Any], line.flights)
    flights.update({number: _Slow() for number in range(5)})
    ended = threading.Event()

    def change():
        number = 5
        while not ended.is_set():
            with line.changed:
                flights[number] = _Slow()
                del flights[number - 5]
            number += 1

    other = threading.Thread(target=change)
    other.start()
    try:
        for _ in range(20):
            assert line.deliverable() is None
    finally:
        ended.set()
        other.join()
