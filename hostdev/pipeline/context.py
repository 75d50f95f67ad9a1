"""The context that all stages of a pipeline share: tables and caches, tests' hooks, and whether steps run alone.

S: number of optimizer state columns of D values per row.

The step and the stages share the processors. If a step leaves some processors idle, overlapping saves time. Otherwise,
the step and the stages take processors and memory bandwidth from each other, and torch's threads wait for the slowest
thread. A step's processor time does not show how many processors it leaves idle, so both modes are tried, and the
faster one is kept. The choice affects only when stages run, never a result.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from hostdev.core.primitive import OpLog, Primitive
from hostdev.core.timeline import Timeline
from hostdev.device.staging import Staging
from hostdev.distributed.exchange import Asked, Exchange
from hostdev.kernels.claims import Claims
from hostdev.kernels.groups import unique_groups
from hostdev.pipeline.batch_ids import Group, RowOffsets
from hostdev.pipeline.forwarding import Forwarding
from hostdev.pipeline.tiers import find_tiers

_FIRST = 4  # number of steps before the first trial; they compile kernels and allocate memory
_BLOCKS = (False, True, False, True)  # blocks of a trial: whether their steps run alone
_COUNTED = 5  # timed steps at the end of a block; the previous block still affects the steps before them
_SHORTEST_PERIOD, _LONGEST_PERIOD = 512, 16_384  # steps between trials; doubled while the result stays the same
BeforeStage = Callable[[str, int], None]
AfterUpdate = Callable[[int, int, Any, list[tuple[Any, Any]]], None]


class Turns:
    """Tries steps that overlap the host's stages and steps that run alone, and chooses the faster mode.

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
        place = self._steps - self._next  # the step's position in the trial; negative before the trial
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineHooks:
    """Points at which a test observes or changes a pipeline.

    Attributes:
        before_stage: Called in a stage's thread before it works on a batch, with the stage's name and the batch's
            number.
        after_update: Called when rows of a batch have been updated, before a later batch changes them. Called with the
            batch's number, the group's number, the rows' ids and, for each table, a pair: the memory that holds the
            rows, [any, 1 + S, D], and the rows' positions in this memory.
        ignore_hazards: Numbers of groups whose read-after-write hazards are ignored, which makes results wrong.
        forward: Whether to forward rows even if rows are not copied to the device, as on the CPU.
        staleness: Number of preceding batches whose updates a lookup may miss. Results are exact only with 0.
    """

    before_stage: BeforeStage | None = None
    after_update: AfterUpdate | None = None
    ignore_hazards: Sequence[int] = ()
    forward: bool = False
    staleness: int = 0


class Context:
    """Objects that all stages share: tables, copies to and from the device, recorded durations, hooks.

    Args:
        groups: The tables.
        offsets: Numbers the rows of all groups.
        staging: Copies between host and device.
        last_writers: For each host row of all groups, the last batch that will write it.
        timeline: Records the stages' durations.
        log: Records the ops' durations.
        exchanges: The exchanges with the ranks that have the other parts of the tables: under the key True, the one for
            passes that update the tables; under False, the one for other passes. Empty if this rank has all rows.
        hooks: Hooks for tests.
        depth: The pipeline's depth.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        offsets: RowOffsets,
        staging: Staging,
        last_writers: Claims,
        timeline: Timeline,
        log: OpLog | None,
        exchanges: Mapping[bool, Exchange],
        hooks: PipelineHooks,
        depth: int,
    ) -> None:
        self.groups, self.staging, self.timeline = groups, staging, timeline
        self.exchanges, self.last_writers, self.hooks = exchanges, last_writers, hooks
        host = Staging(torch.device("cpu")) if exchanges else staging  # rows for other ranks stay in host memory
        self.cached = [number for number, group in enumerate(groups) if group.is_cached]
        self.row_stagings = [staging if number in self.cached else host for number in range(len(groups))]
        self.offsets = offsets
        self.unique = Primitive("Unique", unique_groups, log=log).add_prim_attr("primitive_target", "CPU")
        self.before_stage = hooks.before_stage or (lambda stage, number: None)
        self.on_host = any(group.on_host for group in groups)
        self.keyed = {number: group.keys for number, group in enumerate(groups) if group.keys is not None}
        self.tiers = find_tiers(groups)
        self.row_bytes = sum(group.row_bytes for group in groups if group.on_host)
        on_cpu = staging.device.type == "cpu"
        forwards = (staging.copies or hooks.forward) and not self.cached and not exchanges
        if any(group.late for group in groups):
            forwards = False  # forwarding applies only the previous step, not others that rows have missed
        self.forwarding = Forwarding(groups) if forwards and depth else None
        self.turns = Turns(shares=on_cpu and not exchanges and hooks == PipelineHooks(), depth=depth)
        self.steps = 0  # number of steps whose updates are finished
        self.asked_before: tuple[int, list[Asked]] = 0, []  # number of the last training batch, its `Asked` by group
