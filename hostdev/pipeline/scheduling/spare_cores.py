"""Whether stages of later batches run beside the caller's step on a CPU, or only while the caller waits for a batch.

If the step keeps all processors busy, nothing is gained by running other stages at the same time: each takes processors
from the other, and torch's threads wait for the slowest of them. The decision changes when stages run, never a result.
"""

import statistics
from time import perf_counter, process_time

from hostdev.core.cpus import available_cpus

_FIRST, _PERIOD = 4, 512  # steps before the first measurement, and from one to the next
_MEASURED = 4  # steps; stages that began earlier may still run in the first, which does not count
_SHORTEST = 1e-3  # seconds; shorter steps are not worth the measurement
_SPARE = 0.5  # processors that a step must leave free


class SpareCores:
    """Measures whether steps leave processors free; during a measured step no other stage runs.

    Args:
        shares: Whether the step and the host's stages share the processors. If not, nothing is measured.

    Attributes:
        alone: Whether the current step should run alone.
    """

    def __init__(self, *, shares: bool) -> None:
        self._shares, self.alone = shares, False
        self._steps = 0
        self._found: list[float] = []  # processors that were busy, by measured step
        self._begun: tuple[float, float] | None = None
        self._busy = False  # whether steps leave no processor free

    def begin_step(self) -> None:
        """Record that the caller begins a step; this sets `alone`."""
        if not self._shares:
            return
        place = (self._steps - _FIRST) % _PERIOD
        measures = self._steps >= _FIRST and place < _MEASURED
        self._steps += 1
        self.alone = measures or self._busy
        self._begun = (perf_counter(), process_time()) if measures else None

    def end_step(self) -> None:
        """Record that the caller has ended its step."""
        if self._begun is None:
            return
        wall, used = perf_counter() - self._begun[0], process_time() - self._begun[1]
        self._begun = None
        self._found.append(used / wall if wall >= _SHORTEST else 0.0)
        if len(self._found) >= _MEASURED:
            self._busy = statistics.median(self._found[1:]) > available_cpus() - _SPARE
            self._found = []
