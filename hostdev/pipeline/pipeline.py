"""The pipeline: moves batches through the stages, with at most one training pass at a time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from hostdev.core.primitive import OpLog
from hostdev.core.timeline import Timeline
from hostdev.device.staging import Staging
from hostdev.distributed.exchange import Exchange, make_exchanges
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.kernels.arrays import AnyIds
from hostdev.kernels.claims import MOST_UNFINISHED, Claims
from hostdev.pipeline.batch_ids import Group, Request, RowOffsets
from hostdev.pipeline.context import Context, PipelineHooks
from hostdev.pipeline.keys import KeyedRows
from hostdev.pipeline.path import PassOptions
from hostdev.pipeline.results import StepBatch
from hostdev.pipeline.scheduling.overlapped import OverlappedPass
from hostdev.pipeline.scheduling.passes import Pass, SerialPass
from hostdev.pipeline.stages.step import abandon_step

_MOST_DEPTH = MOST_UNFINISHED - 2


def require_depth(depth: Any) -> None:
    """Raise ValueError unless the depth is an integer that the pipeline supports."""
    if not isinstance(depth, int | np.integer) or not 0 <= depth <= _MOST_DEPTH:
        raise ValueError(f"the depth must be an integer in 0..{_MOST_DEPTH}, not {depth!r}")


class Pipeline:
    """Moves batches through the stages, from the caller's iterator to the update of the tables.

    Args:
        groups: The tables, grouped by shared ids.
        staging: Copies between host and device.
        depth: Number of batches that are looked up ahead. At most depth + 2 batches are being looked up, in the step,
            or being updated. With depth 0, the stages run one after the other in the caller's thread; the results of
            other depths must equal those of depth 0.
        timeline: Records the stages' durations.
        log: Records the ops' durations.
        world: The processes that have the other parts of the tables.
        hooks: Hooks for tests.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        staging: Staging,
        *,
        depth: int,
        timeline: Timeline | None = None,
        log: OpLog | None = None,
        world: World = ALONE_WORLD,
        hooks: PipelineHooks | None = None,
    ) -> None:
        require_depth(depth)
        self.depth, self.groups, self.staging = depth, groups, staging
        self.timeline = timeline or Timeline()
        offsets = RowOffsets(groups)
        claims = Claims(offsets.rows, offsets.get_used) if depth else Claims(0)
        self._world = world
        tables = [[one.table for one in group.embeddings] for group in groups]
        exchanges = make_exchanges(
            world,
            [each[0].total_rows for each in tables],
            [[table.fetched_width for table in each] for each in tables],
            [each[0].capabilities.by_key for each in tables],
        )
        self._context = Context(
            groups, offsets, staging, claims, self.timeline, log, exchanges, hooks or PipelineHooks(), depth
        )
        self._number = 0  # number of the last batch
        self._open_passes: list[Pass] = []
        self.training: Pass | None = None

    @property
    def keyed(self) -> Mapping[int, KeyedRows]:
        """The keys of tables by key, by the numbers of their groups."""
        return self._context.keyed

    @property
    def steps(self) -> int:
        """Number of batches whose updates are finished. Loading a checkpoint sets this number."""
        return self._context.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._context.steps = steps

    @property
    def exchanges(self) -> list[Exchange]:
        """The training passes' exchange with other ranks, in a list; empty without other ranks."""
        return [exchange for update, exchange in self._context.exchanges.items() if update]

    @contextmanager
    def train(
        self,
        batches: Iterable[Request],
        *,
        background: bool = True,
        read_ahead: int | None = None,
        position: int = 0,
    ) -> Iterator[Pass]:
        """Open a pass whose steps update the tables. At its end, the updates of all stepped batches are finished.

        Args:
            batches: The requests.
            background: Whether batches are read in a background thread instead of the caller's thread.
            read_ahead: Maximum number of batches to read beyond the batch that is in its step; None for as many as the
                depth and the caches need.
            position: Number of batches in the caller's loop before the first batch of this pass.

        Raises:
            RuntimeError: Another training pass is open.
        """
        if self.training is not None:
            raise RuntimeError("the tables are being trained; end or close the loop over `train` first")
        window = max(group.window for group in self.groups)
        for group in self.groups:
            group.begin_pass()
        with ExitStack() as ends:
            for group in self.groups:
                ends.callback(group.end_pass)
            opened = self._open(
                batches, window, update=True, background=background, read_ahead=read_ahead, position=position
            )
            try:
                with opened as one:
                    self.training = one
                    yield one
            finally:  # the pass's updates have ended
                self.training = None

    @contextmanager
    def predict(
        self, batches: Iterable[Request], *, background: bool = True, read_ahead: int | None = None
    ) -> Iterator[Pass]:
        """Open a pass that updates nothing; for the arguments, see `train`. An open training pass is drained first."""
        self.write_back()
        with self._open(batches, 0, update=False, background=background, read_ahead=read_ahead) as one:
            yield one

    def abandon(self, batch: StepBatch) -> None:
        """At the end of a pass, abandon a batch that was taken and will not be finished."""
        abandon_step(batch)

    def write_back(self) -> None:
        """Wait for the updates of stepped batches, and write back cached rows: the host tables then have all steps."""
        if self.training is not None:
            self.training.drain()
        for group in self.groups:
            group.cache.write_back_rows()

    def reload(self, table: Any, ids: AnyIds | None) -> None:
        """After `write_back` and a write to a table, read again its rows that were looked up ahead or are cached.

        Args:
            table: The table that was written.
            ids: int32 or int64 [N], local row numbers on this rank; None for all rows.
        """
        for group in self.groups:
            if any(one.table is table for one in group.embeddings):
                group.cache.refresh(table, ids)
        for one in self._open_passes:
            one.reload(table, ids)

    @contextmanager
    def _open(
        self,
        batches: Iterable[Request],
        window: int,
        *,
        update: bool,
        background: bool,
        read_ahead: int | None,
        position: int = 0,
    ) -> Iterator[Any]:
        ahead = self.depth
        if read_ahead is not None:
            window = min(window, read_ahead)
            ahead = min(ahead, read_ahead - window)
        with self.timeline.run() if self.training is None else nullcontext():
            one: SerialPass | OverlappedPass
            options = PassOptions(self.depth, window, self._number, position, update, background, ahead)
            if self.depth:
                one = OverlappedPass(self._context, batches, options, lambda: self._world.is_stuck)
            else:
                one = SerialPass(self._context, batches, options)
            failed = False
            self._open_passes.append(one)
            try:
                yield one
            except GeneratorExit:
                raise
            except BaseException:
                failed = True
                raise
            finally:
                self._open_passes.remove(one)
                try:
                    one.close(failed=failed)
                finally:
                    if self.training is None or update:
                        self._number = max(self._number, one.number)
