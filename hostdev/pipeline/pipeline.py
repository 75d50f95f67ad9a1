"""What takes batches through the stages: groups of tables, the way to the device, one pass over batches at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hostdev.core.primitive import OpLog
from hostdev.core.timeline import Timeline
from hostdev.device.staging import Staging
from hostdev.distributed.exchange import Exchange
from hostdev.distributed.process_group import Ranks
from hostdev.kernels.claims import MOST_UNFINISHED, Claims
from hostdev.pipeline.flight import Flight, Request
from hostdev.pipeline.groups import Group, Ids
from hostdev.pipeline.passes import OverlappedPass, Pass, SerialPass
from hostdev.pipeline.stages import AfterUpdate, Stages

_MOST_DEPTH = MOST_UNFINISHED - 2


def require_depth(depth: Any) -> None:
    """ValueError for what is no depth of a pipeline."""
    if not isinstance(depth, int | np.integer) or not 0 <= depth <= _MOST_DEPTH:
        raise ValueError(f"the depth must be in 0..{_MOST_DEPTH}, not {depth!r}")


class Pipeline:
    """Takes batches through reading, unique, lookup, the caller's step and the update of the tables.

    groups        the tables, by the ids that they share
    staging       the way to the device and back
    depth         how far reading and fetching run ahead: at most depth + 2 batches are alive, those being fetched, the
                  one in the step, and those being updated. 0: the stages run one after the other in the caller's
                  thread, which is the reference
    timeline      where the stages' durations go
    log           where the ops' do
    ranks         processes that have the other parts of the tables; None: there are no others
    others        of `Stages`: staleness, before_stage, after_update, broken
    """

    def __init__(
        self,
        groups: Sequence[Group],
        staging: Staging,
        *,
        depth: int,
        timeline: Timeline | None = None,
        log: OpLog | None = None,
        ranks: Ranks | None = None,
        staleness: int = 0,
        broken: Sequence[int] = (),
        before_stage: Callable[[str, int], None] | None = None,
        after_update: AfterUpdate | None = None,
    ) -> None:
        require_depth(depth)
        self.depth, self.groups, self.staging = depth, groups, staging
        self.timeline = timeline or Timeline()
        rows = sum(group.rows for group in groups if group.on_host) if depth else 0
        self.ranks = ranks
        exchanges = {}
        if ranks is not None:
            tables = [[one.table for one in group.embeddings] for group in groups]
            shapes = [each[0].total_rows for each in tables], [[table.dim for table in each] for each in tables]
            exchanges = {update: Exchange(ranks, *shapes) for update in (True, False)}
        self._stages = Stages(
            groups, staging, Claims(rows), self.timeline, log=log, exchanges=exchanges, staleness=staleness,
            broken=broken, before_stage=before_stage, after_update=after_update,
        )  # fmt: skip
        self._number = 0  # the last batch
        self._open_passes: list[Pass] = []
        self.training: Pass | None = None

    @property
    def steps(self) -> int:
        """Batches whose updates are finished; set by who loads a checkpoint."""
        return self._stages.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._stages.steps = steps

    def exchanged_bytes(self) -> dict[str, int]:
        """Return the bytes sent to others in training: for rows, and the least that could have been."""
        exchange = self._stages.exchanges[True]
        return {"rows": exchange.sent_bytes, "least": exchange.least_bytes}

    @contextmanager
    def train(
        self, batches: Iterable[Request], *, background: bool = True, read_ahead: int | None = None
    ) -> Iterator[Pass]:
        """Open a pass whose steps update the tables, from what they are now; at its end all is updated.

        background  read in a thread, and not in that of the steps
        read_ahead  at most so many batches are read beyond the one in its step; None: as many as depth and caches take

        RuntimeError while another is open.
        """
        if self.training is not None:
            raise RuntimeError("the tables are being trained; end or close the loop over `train` before")
        window = max(group.window for group in self.groups)
        for group in self.groups:
            if group.cache is not None:
                group.cache.refresh()
        try:
            with self._open(batches, window, update=True, background=background, read_ahead=read_ahead) as one:
                self.training = one
                yield one
        finally:  # its updates have ended
            self.training = None
            for embedding in self._embeddings():
                embedding.uncount_unfinished()
            for group in self.groups:
                if group.cache is not None:
                    group.cache.write_back()

    @contextmanager
    def predict(
        self, batches: Iterable[Request], *, background: bool = True, read_ahead: int | None = None
    ) -> Iterator[Pass]:
        """Open a pass that updates nothing; within one of `train` that has been drained, too; arguments as there."""
        self.write_back()
        with self._open(batches, 0, update=False, background=background, read_ahead=read_ahead) as one:
            yield one

    def abandon(self, flight: Flight) -> None:
        """Give up a batch that was taken and is not to be finished; for the end of a pass."""
        self._stages.abandon_step(flight)

    def write_back(self) -> None:
        """Bring the host tables up to date: with what has been stepped, and with the caches."""
        if self.training is not None:
            self.training.drain()
        for group in self.groups:
            if group.cache is not None:
                group.cache.write_back_rows()

    def reload(self, table: Any, ids: Ids | None) -> None:
        """Look rows up again that were looked up ahead or are in a cache; after `write_back` and a write to the table.

        ids  int32 or int64 [N], numbers of rows here; None for all
        """
        for group in self.groups:
            if group.cache is not None and any(one.table is table for one in group.embeddings):
                group.cache.refresh(table, ids)
        for one in self._open_passes:
            one.reload(table, ids)

    @contextmanager
    def _open(
        self, batches: Iterable[Request], window: int, *, update: bool, background: bool, read_ahead: int | None
    ) -> Iterator[Any]:
        ahead = self.depth
        if read_ahead is not None:
            window = min(window, read_ahead)
            ahead = min(ahead, read_ahead - window)
        with self.timeline.run() if self.training is None else _nothing():
            one: SerialPass | OverlappedPass
            if self.depth:
                one = OverlappedPass(
                    self._stages, batches, depth=self.depth, window=window, number=self._number, update=update,
                    background=background, ahead_of_step=ahead, in_vain=self._waits_in_vain,
                )  # fmt: skip
            else:
                one = SerialPass(self._stages, batches, window=window, number=self._number, update=update)
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

    def _waits_in_vain(self) -> bool:
        """Tell whether other ranks have been found to do something else, and do not come."""
        return self.ranks is not None and self.ranks.calls.wrong is not None

    def _embeddings(self) -> Iterator[Any]:
        return (embedding for group in self.groups for embedding in group.embeddings)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
