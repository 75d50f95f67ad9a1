"""Decides whether later batches' stages overlap with the caller's step on a CPU, or take turns with it.

The step and the stages share the processors. If a step leaves some processors idle, overlapping saves time. Otherwise,
the step and the stages take processors and memory bandwidth from each other, and torch's threads wait for the slowest
thread. A step's processor time does not show how many processors it leaves idle, so both modes are tried, and the
faster one is kept. The choice affects only when stages run, never a result.
"""

import statistics
from time import perf_counter

_FIRST = 4  # steps before the first trial, during which kernels are compiled and memory is allocated
_BLOCKS = (False, True, False, True)  # blocks of a trial: whether their steps run alone
_COUNTED = 5  # timed steps of a block, after the steps that the previous block still affects
_SHORTEST_PERIOD, _LONGEST_PERIOD = 512, 16_384  # steps between trials; doubled while the result stays the same


class Turns:
    """Tries both modes, and chooses the faster one.

    Args:
        shares: Whether the step and the host's stages share the processors. If not, they always overlap.
        depth: Number of batches that are looked up ahead.

    Attributes:
        alone: Whether the current step should run alone.
    """

    def __init__(self, *, shares: bool, depth: int) -> None:
        self._shares, self.alone = shares, False
        self._block = depth + 1 + _COUNTED
        self._next, self._period = _FIRST, _SHORTEST_PERIOD
        self._chosen = False  # the choice of the last trial
        self._steps = 0
        self._begun = 0.0
        self._seconds: tuple[list[float], list[float]] = [], []  # seconds of timed steps: overlapped, alone

    def begin_step(self) -> None:
        """Record that the caller begins a step, and set `alone` for this step."""
        if not self._shares:
            return
        now = perf_counter()
        place = self._steps - self._next  # within the trial
        if place > 0:  # the previous step was at place - 1
            block, step = divmod(place - 1, self._block)
            if step >= self._block - _COUNTED:
                self._seconds[_BLOCKS[block]].append(now - self._begun)
            if place == self._block * len(_BLOCKS):
                self._choose()
                place = -1
        self._begun = now
        self.alone = _BLOCKS[place // self._block] if place >= 0 else self._chosen
        self._steps += 1

    def _choose(self) -> None:
        overlapped, alone = map(statistics.median, self._seconds)
        self._seconds = [], []
        before, self._chosen = self._chosen, alone < overlapped
        same = before is self._chosen
        self._period = min(2 * self._period, _LONGEST_PERIOD) if same else _SHORTEST_PERIOD
        self._next = self._steps + self._period
