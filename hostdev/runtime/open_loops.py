"""What a runtime knows of the loops over it: which are open, what they have read and left, which tables are whose."""

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch

from hostdev.core.errors import HostdevError
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.world import ALONE_WORLD
from hostdev.pipeline.pipeline import Pipeline
from hostdev.runtime import scaling
from hostdev.runtime.access import Access
from hostdev.runtime.features import GroupSpec
from hostdev.runtime.loaders import PredictLoader
from hostdev.runtime.loop import PredictLoop, TrainLoop, trained, trained_by
from hostdev.runtime.pending import FirstBatch, Pending, take_step
from hostdev.runtime.random_streams import Place, RandomStreams
from hostdev.runtime.read_ahead import ReadAhead


class ForLoops:
    """What `Runtime` has for its loops; the fields without values are the runtime's own."""

    device: torch.device
    pipeline: Pipeline
    ranks: Ranks | None
    group_specs: list[GroupSpec]
    tables: Any
    close_loaders: Any
    is_frozen: Any
    learning_rates: Any
    _require_open: Any

    def _begin_loops(self) -> None:
        self.predicting = 0  # loops over `predict` that are open
        self._predict_loops: WeakSet[PredictLoop] = WeakSet()  # those, and some that are over
        self._open: ReferenceType[TrainLoop] | None = None  # the open loop over `train`, which ends when it is dropped
        self._access = Access(self)
        self._pending: Pending | None = None  # gradients that wait for a step
        self._read_ahead: list[ReadAhead] = []  # of the iterators that loops have read and not come to the end of
        self._left: ReadAhead | None = None  # by the last loop over train
        self._late: tuple[type[BaseException], str] | None = None  # an error of a loop that was dropped
        self._loaded_place: Place | None = None

    @property
    def open_loop(self) -> TrainLoop | None:
        """The open loop over `train`, if there is one."""
        return self._loop

    @property
    def _loop(self) -> TrainLoop | None:
        return self._open() if self._open is not None else None

    def keep_pending(self, pending: Pending) -> None:
        """Keep gradients that wait for a step which a loop was left before."""
        self._pending = pending
        scaling.watch_pending(pending)

    def first_batch(self) -> FirstBatch | None:
        """Return what the first batch of a loop is to do about gradients that wait for a step; None: there are none."""
        pending = self._pending
        if pending is None or not pending.is_kept():
            self._pending = None
            return None
        return FirstBatch(pending, [group.tables for group in self.group_specs], self.pipeline, self._is_decided)

    def _is_decided(self, pending: Pending) -> None:
        if self._pending is pending:  # else the loop has been left with others
            self._pending = None

    def apply_pending(self, pending: Pending) -> None:
        """Take the step for such gradients alone, with an optimizer that takes it outside of a loop."""
        if pending is not self._pending or self._loop is not None:
            return
        self._pending = None
        self.learning_rates()
        take_step(self.pipeline, pending, {table.name for table in self.tables.values() if self.is_frozen(table)})

    def _drop_gradients(self) -> None:
        if self._pending is not None:
            self._pending.drop()
        if (loop := self._loop) is not None:
            loop.drop_gradients()

    @property
    def reads_ahead(self) -> bool:
        """Tell whether a loop reads batches before it comes to them."""
        return bool(self.pipeline.depth or any(group.window for group in self.pipeline.groups))

    def random_streams(self, place: Place | None, each: int) -> RandomStreams:
        """Return the streams of a loop's batches, of which a step here has so many; `place` is where they go on."""
        share, shares = (self.ranks or ALONE_WORLD).share()
        if shares == 1:
            return RandomStreams(self.device, place)
        return RandomStreams(self.device, place, stride=each * shares, each=each, first=each * share)

    @property
    def place(self) -> Place | None:
        """Where a loop over `train` is in its batches, or has left an iterator; None where none is under way."""
        if (loop := self._loop) is not None:
            return loop.place
        return None if self._left is None else self._left.place

    def go_on_at(self, place: Place | None) -> None:
        """Let the next loop over `train` go on at a place in its batches, which a checkpoint has."""
        self._loaded_place = place

    def take_loaded_place(self) -> Place | None:
        """Return the place that a checkpoint has brought, for one loop."""
        place, self._loaded_place = self._loaded_place, None
        return place

    def read_ahead_of(self, source: Iterator[Any], *, train: bool) -> ReadAhead:
        """Return an iterator's batches, with those first that a loop has read and not come to."""
        self._read_ahead = [one for one in self._read_ahead if one.is_held or one is self._left]
        found = next((one for one in self._read_ahead if one.source is source), None)
        if found is None:
            found = ReadAhead(source)
            self._read_ahead.append(found)
        if train:
            self._left = found
        return found

    def read_out(self, ahead: ReadAhead) -> None:
        """Note that an iterator has come to its end."""
        self._read_ahead = [one for one in self._read_ahead if one is not ahead]
        if self._left is ahead:
            self._left = None

    def failed_late(self, error: BaseException) -> None:
        """Keep an error of a loop that nobody holds: nobody has caught it."""
        self._late = type(error), str(error)

    def raise_late(self) -> None:
        """Raise what a loop that was left has failed with at its end, if it has."""
        if self._late is not None:
            (kind, text), self._late = self._late, None
            raise (kind(text) if issubclass(kind, HostdevError) else RuntimeError(f"{kind.__name__}: {text}"))

    def begin_training(self, loop: TrainLoop) -> None:
        """Note that a loop over `train` opens; ValueError while another one over these tables is open."""
        self._close_abandoned()
        self.raise_late()
        if self._loop is not None:
            raise ValueError("a loop over `train` is open; end it, or call its close(), before the next one")
        self._require_own()
        self.close_loaders(PredictLoader)
        if self.is_predicting():
            raise ValueError("a loop over `predict` is open; end it, or call its close(), before training")
        self._open = ref(loop)
        for table in self.tables.values():
            trained[table] = self._open
        self._own()

    def is_predicting(self) -> bool:
        """Tell whether a loop over `predict` is open; one whose body has raised is closed."""
        if self.predicting:
            self._close_abandoned(but=self._loop)
        return self.predicting > 0

    def _close_abandoned(self, *, but: TrainLoop | None = None) -> None:
        """Close loops over these tables whose body has raised: in a notebook, the traceback may hold them for long."""
        training = [trained_by(table) for table in self.tables.values()]
        for loop in [*training, *self._predict_loops]:
            if loop is not None and (loop.is_abandoned or loop.is_finished) and loop is not but:
                loop.close()

    def _require_own(self) -> None:
        """ValueError while a loop of another runtime trains one of the tables."""
        busy = [table.name for table in self.tables.values() if trained_by(table) is not None]
        if busy and self._loop is None:
            raise ValueError(
                f"table {busy[0]!r} is being trained by a loop of another runtime; end it, or call its close(), first"
            )

    def end_training(self) -> None:
        """Note that it has closed."""
        self._open = None
        for table in self.tables.values():
            trained.pop(table, None)
        self._disown()

    def _own(self) -> None:
        for table in self.tables.values():
            table.add_owner(self._access)

    def _disown(self) -> None:
        if self._loop is None and not self.predicting:
            for table in self.tables.values():
                table.remove_owner(self._access)

    def begin_prediction(self, loop: PredictLoop) -> None:
        """Note that a loop over `predict` opens; ValueError while one of another runtime trains these tables."""
        self._catch_up()
        if self._loop is None and not self.predicting:
            self._own()
        self.predicting += 1
        self._predict_loops.add(loop)

    def _catch_up(self) -> None:
        """Let the tables be those of all steps so far; ValueError while a loop of another runtime trains them."""
        self._require_open()
        self._close_abandoned(but=self._loop)
        self.raise_late()
        self._require_own()
        if (training := self._loop) is not None:
            training.submit()

    def end_prediction(self) -> None:
        """Note that it has closed."""
        self.predicting -= 1
        self._disown()
