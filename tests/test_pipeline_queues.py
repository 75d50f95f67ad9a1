"""What the threads of a pipeline share."""

import threading
import time
from typing import Any, cast

from hostdev.pipeline.scheduling.workers import PipelineQueues


class _Slow:
    """A batch that is looked at for long enough that another thread comes between."""

    @property
    def ready(self) -> list[Any]:
        time.sleep(0.0005)
        return []


def test_batches_in_flight_are_walked_while_others_change_them():
    batches = PipelineQueues(0).in_flight
    by_number = cast(dict[int, Any], batches.by_number)
    by_number.update({number: _Slow() for number in range(5)})
    ended = threading.Event()

    def change():
        number = 5
        while not ended.is_set():
            with batches.changed:
                by_number[number] = _Slow()
                del by_number[number - 5]
            number += 1

    other = threading.Thread(target=change)
    other.start()
    try:
        for _ in range(20):
            assert batches.find_ready() is None
    finally:
        ended.set()
        other.join()
