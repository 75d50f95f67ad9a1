"""`Runtime`: tables behind features, for anybody's torch model and loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakSet, ref

import torch

from hostdev.cache.cache import EmbeddingCache
from hostdev.core.errors import UserError
from hostdev.core.memory import TableShape
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.primitive import OpLog
from hostdev.core.timeline import Timeline
from hostdev.device import backend
from hostdev.device.staging import Staging
from hostdev.device.table import DeviceTable
from hostdev.parallel.ranks import Ranks
from hostdev.pipeline.groups import Group
from hostdev.pipeline.pipeline import Pipeline, require_depth
from hostdev.runtime import room
from hostdev.runtime.access import Access
from hostdev.runtime.features import GroupSpec, Table, require_seeds, resolve
from hostdev.runtime.loop import PredictLoop, TrainLoop
from hostdev.runtime.read_ahead import ReadAhead
from hostdev.runtime.requests import IdsOf, Reader
from hostdev.runtime.spec import CacheSpec
from hostdev.runtime.table_optimizer import TableOptimizer

if TYPE_CHECKING:
    from hostdev.checkpoint.saving import Saving
    from hostdev.runtime.saving import Keeper

_trained: WeakSet[Any] = WeakSet()  # tables, by loops that are open


class Runtime:
    """Looks up the rows of a model's tables for the batches to come, and updates them with their gradients.

    ::

        users = hostdev.HostTable(1_000_000, 64, hostdev.LazyAdam(lr=1e-3), name="users")
        items = hostdev.HostTable(5_000_000, 64, hostdev.LazyAdam(lr=1e-3), name="items")
        runtime = hostdev.Runtime({"user": users, "item": items, "history": hostdev.Feature(items, pooling="mean")},
                                  device="cuda", cache="10%")
        ids = lambda batch: {"user": batch.user, "item": batch.item, "history": (batch.history, batch.lengths)}
        for batch, rows in runtime.train(loader, ids=ids):
            loss = criterion(model(rows["user"], rows["item"], rows["history"]), batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    features  by name: a table, a tuple of tables that are looked up with the same ids, or a `Feature` of these. Several
              features may share a table
    device    where the rows go: "auto", "cpu", "cuda", ..., or a torch.device
    cache     hot rows on the device: a number of rows or a share of each table such as "10%", or a `CacheSpec`; or a
              dict of these by the name of a table, for it and those that are looked up with the same ids. None for none
    depth     how many batches ahead are read and looked up while one is in its step; 0: one stage after the other
    ranks     the processes that have met (`hostdev.parallel`), each with a part of every table; all make their
              runtimes in the same order. None: this one is alone
    dense_exchange  how ranks add up the gradients of `Rows.reduce`: "tree", in an order that does not depend on their
              number, or "all-reduce", as DistributedDataParallel does
    log       where every op's durations go
    timeline  where the stages' durations go
    seams     for tests and `hostdev.verify`: staleness, broken, before_stage, after_update of `Pipeline`

    The bits do not depend on device memory or host memory, cache, depth or threads. Tables that the same features look
    up are a group, with one cache. The order of all sums is that of the features, and of the ids within them.

    Raises UserError where there is no such device or not enough memory, TypeError or ValueError for wrong arguments.
    """

    def __init__(
        self,
        features: Mapping[str, Any],
        *,
        device: torch.device | str = "auto",
        cache: Any = None,
        depth: int = 2,
        ranks: Ranks | None = None,
        dense_exchange: str = EXCHANGES[0],
        log: OpLog | None = None,
        timeline: Timeline | None = None,
        **seams: Any,
    ) -> None:
        self.wanted, self.group_specs = resolve(features)
        self.ranks, self.dense_exchange = ranks, dense_exchange
        require_depth(depth)
        if dense_exchange not in EXCHANGES:
            raise ValueError(f"dense_exchange must be one of {', '.join(EXCHANGES)}, not {dense_exchange!r}")
        _require_parts(self.group_specs, ranks)
        require_seeds(self.group_specs, ranks)
        self.device = backend.require(device)
        _require_place(self.group_specs, self.device)
        specs = _cache_specs(cache, self.group_specs)
        beside = room.kept(
            [
                room.GroupSize(
                    group.tables[0].rows,
                    [TableShape(table.dim, table.optimizer, table.dtype) for table in group.tables],
                    _on_host(group),
                    spec,
                )
                for group, spec in zip(self.group_specs, specs, strict=True)
            ],
            depth=depth,
            slots_on_host=not backend.is_accelerator(self.device),
        )
        beside.pop("tables", None)
        room.require(beside, room.free_with_counts(beside))
        self.staging = Staging(self.device, log, batches=depth + 2)
        groups = []
        for group, spec in zip(self.group_specs, specs, strict=True):
            made = None
            if spec is not None:
                counts = spec.counts
                if counts is not None and ranks is not None:
                    counts = counts[group.tables[0].ids(0, group.tables[0].rows)]  # type: ignore[union-attr]
                made = EmbeddingCache(
                    group.tables,  # type: ignore[arg-type]
                    spec.rows, spec.policy, self.device, spec.window, counts=counts, record=spec.record, log=log,
                )  # fmt: skip
            groups.append(Group(group.tables, made, log))  # type: ignore[arg-type]
        self.pipeline = Pipeline(groups, self.staging, depth=depth, timeline=timeline, log=log, ranks=ranks, **seams)
        self.dense_channel = self.other_channels = None
        if ranks is not None:
            alike = ranks.mesh.data == ranks.size  # all ranks have the same parameters
            self.dense_channel = ranks.device_channel(self.device, None if alike else "data")
            self.other_channels = None if alike else (ranks.channel("data"), ranks.channel())
        self.predicting = 0  # loops over `predict` that are open
        self._open: ReferenceType[TrainLoop] | None = None  # the open loop over `train`, which ends when it is dropped
        self._access = Access(self)
        self._frozen: set[str] = set()
        self._optimizer: TableOptimizer | None = None
        self._read_ahead: ReadAhead | None = None  # of the iterator that a loop has been left with
        self._late: tuple[type[BaseException], str] | None = None  # an error of a loop that was dropped
        self._saved: Keeper | None = None

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name."""
        return {table.name: table for group in self.group_specs for table in group.tables}

    @property
    def caches(self) -> list[EmbeddingCache]:
        """The caches of the groups that have one."""
        return [group.cache for group in self.pipeline.groups if group.cache is not None]

    def exchanged_bytes(self) -> dict[str, int]:
        """Return the bytes sent to other ranks in training: for rows, the least that could have been, for the rest."""
        assert self.dense_channel is not None
        return {**self.pipeline.exchanged_bytes(), "dense": self.dense_channel.sent_bytes}

    @property
    def optimizer(self) -> TableOptimizer:
        """The tables' learning rates as a torch optimizer, for torch's schedulers: a parameter group for each table."""
        if self._optimizer is None:
            self._optimizer = TableOptimizer(self.tables.values(), self._drop_gradients)
        return self._optimizer

    @property
    def has_optimizer(self) -> bool:
        """Tell whether somebody has asked for `optimizer`."""
        return self._optimizer is not None

    def train(
        self,
        batches: Iterable[Any],
        *,
        ids: IdsOf | None = None,
        send: Callable[[Any], Any] | None = None,
        accumulate: int = 1,
        micro_batches: int | None = None,
        reduce_early: bool = False,
        by_step: bool = False,
    ) -> TrainLoop:
        """Return an iterator of (batch, rows): each batch with its `Rows`, whose gradients go to the tables.

        batches     a DataLoader or any other iterable. It is read in a thread of its own, ahead of the loop; what it
                    has given must not be changed
        ids         returns a batch's ids by feature: integers [B] or [B, k], a `Bag`, or (values, lengths). Called in
                    that thread. None where the batches are dicts that have them under the features' names
        send        returns what the loop needs of a batch in place of the batch, in any structure of tuples, lists and
                    dicts: its tensors and arrays are brought to the device on the way. None: the batch, as it is
        accumulate  batches whose gradients add up to one step: their rows are looked up at once, and updated once
        micro_batches  as `accumulate`, and in an order that does not depend on who computes them: see `Rows.reduce`,
                    which is to be called with each. With other ranks, how many of a step's each of them has. None:
                    the batches are whole
        reduce_early  with other ranks, a parameter's gradient is on its way as soon as the last micro-batch's backward
                    pass has brought it, as with DistributedDataParallel, and not only with `reduce`. Then nothing may
                    change it between the two, and a loop may not be left there
        by_step     with other ranks, give a step's micro-batches at once, as a `Step`: for those who take them in an
                    order of their own, as stages do

        A table takes a step with a batch if a gradient has come to its rows by then. When a step is skipped, as there
        was no `backward`, nothing changes. Breaking off, or an error, ends the loop: what has been stepped is in the
        tables. Where `batches` is an iterator, such as a generator, it has been read further than the loop has come;
        the next loop over the same iterator gets those batches first. ValueError while another loop over these tables
        is open.
        """
        if accumulate < 1:
            raise ValueError(f"accumulate is a number of batches, not {accumulate}")
        if micro_batches is None and self.ranks is None:
            if reduce_early:
                raise ValueError("reduce_early is about micro-batches; say how many, with micro_batches=")
            return TrainLoop(self, batches, Reader(self.wanted, self.group_specs, ids, send, accumulate))
        micro_batches = 1 if micro_batches is None else micro_batches
        if micro_batches < 1 or accumulate != 1:
            raise ValueError(
                f"micro_batches is a number of batches, not {micro_batches}"
                if micro_batches < 1
                else "micro_batches and accumulate are two ways to say how many batches make a step; give one"
            )
        if by_step and self.ranks is None:
            raise ValueError("by_step is for stages on several ranks, and this process is alone")
        reader = Reader(self.wanted, self.group_specs, ids, send, micro_batches, whole=True, asks=self._asks)
        return TrainLoop(self, batches, reader, micro_batches, reduce_early=reduce_early, by_step=by_step)

    @property
    def _asks(self) -> bool:
        """Tell whether this rank looks up the rows of its samples."""
        return self.ranks is None or self.ranks.leads

    def predict(
        self, batches: Iterable[Any], *, ids: IdsOf | None = None, send: Callable[[Any], Any] | None = None,
        micro_batches: int | None = None,
    ) -> PredictLoop:  # fmt: skip
        """Return an iterator of (batch, rows) as `train` does, with rows that no gradient goes to; nothing changes.

        micro_batches  so many batches at once, as a `Step`; None: one after the other

        Within a loop over `train` the tables are as after its last optimizer step.
        """
        together = 1 if micro_batches is None else micro_batches
        reader = Reader(
            self.wanted, self.group_specs, ids, send, together, whole=micro_batches is not None, asks=self._asks
        )
        return PredictLoop(self, batches, reader, by_step=micro_batches is not None)

    def look_up(self, ids: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows of one batch of ids, by feature, as `predict` gives them."""
        with self.predict([ids]) as loop:
            for _, rows in loop:
                return dict(rows)
        raise AssertionError("one batch has one result")

    def freeze(self, *tables: str) -> None:
        """From the next batch on no gradient goes to these tables, by name, or to all; their rows do not change."""
        self._frozen |= self._named(tables)

    def unfreeze(self, *tables: str) -> None:
        """End what `freeze` began."""
        self._frozen -= self._named(tables)

    def is_frozen(self, table: Any) -> bool:
        """Tell whether no gradient goes to a table."""
        return table.name in self._frozen

    def _named(self, tables: tuple[str, ...]) -> set[str]:
        known = self.tables
        for name in tables:
            if name not in known:
                raise ValueError(f"no table {name!r}; there are {', '.join(known)}")
        return set(tables or known)

    @property
    def open_loop(self) -> TrainLoop | None:
        """The open loop over `train`, if there is one."""
        return self._loop

    @property
    def _loop(self) -> TrainLoop | None:
        return self._open() if self._open is not None else None

    def write_back(self) -> None:
        """Bring the host tables up to date with all steps so far and with the caches, also in the middle of a loop."""
        self.raise_late()
        if (loop := self._loop) is not None:
            loop.submit()
        self.pipeline.write_back()

    def save(self, path: Path | str, *, extra: Any = None, keep: int = 3, wait: bool = True) -> "Saving":
        """Save a checkpoint of all tables, with slots and steps, to a folder of checkpoints (docs/checkpoints.md).

        In the middle of a loop, too: once the dense side's optimizer has taken its step, the checkpoint is of after
        this batch, and what the loop has read ahead stays. It holds all rows, or where this runtime has saved one to
        this folder before, or loaded one from there, the rows written since. Training may go on while it is written.

        extra  what is to be kept beside the tables: `state_dict`s of the dense side, of its optimizer and of
               schedulers, the place in the data, in dicts, lists, tensors, numbers and text
        keep   so many of the newest checkpoints in the folder are kept, with those that they add to; 1 or more
        wait   for the end of the writing; else it goes on behind, and `wait()` of what is returned raises its error.
               The end of the program waits for it. An error that nobody has waited for is a warning in the next `save`
               or `load`, or a line on standard error at the end of the program

        Raises OSError where it cannot be written, TypeError for what `extra` cannot hold, ValueError for a wrong
        `keep`, and UserError where the folder cannot be made or another process writes there.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep is a number of checkpoints, 1 or more, not {keep!r}")
        self.write_back()
        return self._keeper.save(Path(path), extra, keep, wait=wait)

    def load(self, path: Path | str, *, strict: bool = True) -> Any:
        """Load the newest whole checkpoint of a folder, or the one that `path` is, into the tables; return its `extra`.

        Files are checked before a table is changed; those of host tables that nobody has used yet while they are
        loaded, and where none is whole, or Ctrl-C ends it, these have their initial values again; after Ctrl-C others
        hold some of the checkpoint's rows. Where the newest is damaged, a warning says so, and the one before is
        loaded. Raises UserError for a checkpoint of other tables or of another program, and where there is none that is
        whole; ValueError while a loop is open.

        strict  False: load the tables that both have, also into those with more rows, whose others stay as they are. A
                warning for each says what is left out. Tables have the checkpoint's steps, rates and seeds then, and
                the next checkpoint holds all rows
        """
        if self._loop is not None or self.predicting:
            raise ValueError("a loop over these tables is open; end it, or call its close(), before loading")
        self.raise_late()
        self.pipeline.write_back()
        return self._keeper.load(Path(path), strict=strict)

    @property
    def _keeper(self) -> "Keeper":
        if self._saved is None:
            from hostdev.runtime.saving import Keeper  # what it stands on takes time to load

            self._saved = Keeper(self)
        return self._saved

    def _drop_gradients(self) -> None:
        if (loop := self._loop) is not None:
            loop.drop_gradients()

    def read_ahead_of(self, source: Iterator[Any]) -> ReadAhead:
        """Return an iterator's batches, with those first that a loop has read and not come to."""
        if self._read_ahead is None or self._read_ahead.source is not source:
            self._read_ahead = ReadAhead(source)
        return self._read_ahead

    def read_out(self, ahead: ReadAhead) -> None:
        """Note that an iterator has come to its end."""
        if self._read_ahead is ahead:
            self._read_ahead = None

    def failed_late(self, error: BaseException) -> None:
        """Keep an error of a loop that nobody holds: nobody has caught it."""
        self._late = type(error), str(error)

    def raise_late(self) -> None:
        """Raise what a loop that was left has failed with at its end, if it has."""
        if self._late is not None:
            (kind, text), self._late = self._late, None
            raise (kind(text) if issubclass(kind, UserError) else RuntimeError(f"{kind.__name__}: {text}"))

    def begin_training(self, loop: TrainLoop) -> None:
        """Note that a loop over `train` opens; ValueError while another one over these tables is open."""
        self.raise_late()
        if self._loop is not None:
            raise ValueError("a loop over `train` is open; end it, or call its close(), before the next one")
        self._require_own()
        if self.predicting:
            raise ValueError("a loop over `predict` is open; end it, or call its close(), before training")
        self._open = ref(loop)
        _trained.update(self.tables.values())
        self._own()

    def _require_own(self) -> None:
        """ValueError while a loop of another runtime trains one of the tables."""
        busy = [table.name for table in self.tables.values() if table in _trained]
        if busy and self._loop is None:
            raise ValueError(
                f"table {busy[0]!r} is being trained by a loop of another runtime; end it, or call its close(), first"
            )

    def end_training(self) -> None:
        """Note that it has closed."""
        self._open = None
        for table in self.tables.values():
            _trained.discard(table)
        self._disown()

    def _own(self) -> None:
        for table in self.tables.values():
            table.add_owner(self._access)

    def _disown(self) -> None:
        if self._loop is None and not self.predicting:
            for table in self.tables.values():
                table.remove_owner(self._access)

    def begin_prediction(self) -> None:
        """Note that a loop over `predict` opens; ValueError while one of another runtime trains these tables."""
        self.raise_late()
        self._require_own()
        if (loop := self._loop) is not None:
            loop.submit()
        elif not self.predicting:
            self._own()
        self.predicting += 1

    def end_prediction(self) -> None:
        """Note that it has closed."""
        self.predicting -= 1
        self._disown()

    def learning_rates(self) -> list[float]:
        """Return the tables' learning rates, after they have been given those that a scheduler has set."""
        if self._optimizer is not None:
            self._optimizer.apply()
        return [table.optimizer.lr for table in self.tables.values()]

    def exchange_rates(self, rates: list[float]) -> list[float]:
        """Let the tables have these learning rates; return those before."""
        tables = list(self.tables.values())
        before = [table.optimizer.lr for table in tables]  # all first: tables may share an optimizer
        for table, rate in zip(tables, rates, strict=True):
            if table.optimizer.lr != rate:
                table.optimizer.lr = rate
        return before


def _require_place(groups: list[GroupSpec], device: torch.device) -> None:
    for group in groups:
        for table in group.tables:
            if isinstance(table, DeviceTable) and table.device != device:
                raise ValueError(f"table {table.name!r} is on {table.device}, and the rows go to {device}")


def _cache_specs(cache: Any, groups: list[GroupSpec]) -> list[CacheSpec | None]:
    """Return each group's cache."""
    if cache is None:
        return [None] * len(groups)
    if not isinstance(cache, Mapping):
        spec = cache if isinstance(cache, CacheSpec) else CacheSpec(cache)
        if not any(_on_host(group) for group in groups):
            raise UserError("a cache has no effect where all tables are on the device; leave it out")
        return [spec if _on_host(group) else None for group in groups]
    specs: list[CacheSpec | None] = [None] * len(groups)
    for name, value in cache.items():
        found = [i for i, group in enumerate(groups) if name in [table.name for table in group.tables]]
        if not found:
            known = [table.name for group in groups for table in group.tables]
            raise ValueError(f"a cache for table {name!r}, but there are {', '.join(known)}")
        if not _on_host(groups[found[0]]):
            raise UserError(f"a cache for table {name!r}, which is on the device, has no effect; leave it out")
        if specs[found[0]] is not None:
            raise ValueError(
                f"table {name!r} shares its ids, and so its cache, with another one that has a cache given"
            )
        if value is not None:
            specs[found[0]] = value if isinstance(value, CacheSpec) else CacheSpec(value)
    return specs


def _on_host(group: GroupSpec) -> bool:
    return group.tables[0].primitive_target == "CPU"


def _require_parts(groups: list[GroupSpec], ranks: Ranks | None) -> None:
    """ValueError unless every table is this rank's part, or all of it where there are no others."""
    wanted = None if ranks is None else ranks.part()
    for table in (table for group in groups for table in group.tables):
        part = getattr(table, "part", None)
        if part != wanted:
            raise ValueError(
                f"table {table.name!r} holds {'all rows' if part is None else f'part {part[0]} of {part[1]}'}, but "
                + ("there are no other ranks" if wanted is None else f"this is rank {wanted[0]} of {wanted[1]}")
                + "; make it with part=ranks.part(), and give the Runtime these ranks"
            )
