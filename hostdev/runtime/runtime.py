"""`Runtime`: tables behind features, for anybody's torch model and loop."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from hostdev.cache.cache import EmbeddingCache
from hostdev.core.launched import require_alone
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.primitive import OpLog
from hostdev.core.timeline import Timeline
from hostdev.device import backend
from hostdev.device.staging import Staging
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.world import ALONE_WORLD
from hostdev.pipeline.groups import Group
from hostdev.pipeline.hooks import PipelineHooks
from hostdev.pipeline.pipeline import Pipeline, require_depth
from hostdev.runtime import alike
from hostdev.runtime.features import Table, require_seeds, resolve
from hostdev.runtime.loaders import ForFrameworks
from hostdev.runtime.look_up import look_up
from hostdev.runtime.loop import PredictLoop, TrainLoop
from hostdev.runtime.open_loops import ForLoops
from hostdev.runtime.partial import ids_of_some, some_features
from hostdev.runtime.placement import cache_specs, require_parts, require_place, require_room
from hostdev.runtime.read_ahead import require_read_ahead
from hostdev.runtime.requests import IdsOf, Reader
from hostdev.runtime.table_optimizer import TableOptimizer

if TYPE_CHECKING:
    from hostdev.checkpoint.writer import AsyncWriter
    from hostdev.runtime.saving import RuntimeCheckpoints


class Runtime(ForFrameworks, ForLoops):
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
    ranks     the processes that have met (`hostdev.distributed`), each with a part of every table; all make their
              runtimes in the same order. None: this one is alone; where a launcher has started several, it is to
              say that this is meant, by `hostdev.alone()`
    dense_exchange  how ranks add up the gradients of `Rows.reduce`: "tree", in an order that does not depend on their
              number, or "all-reduce", as DistributedDataParallel does
    log       where every op's durations go
    timeline  where the stages' durations go
    hooks     into the pipeline, for tests and `hostdev.verify`

    The bits do not depend on device memory or host memory, cache, depth or threads. Tables that the same features look
    up are a group, with one cache. The order of all sums is that of the features, and of the ids within them.

    Raises UserError where there is no such device or not enough memory, and in one of several processes without
    `ranks`; TypeError or ValueError for wrong arguments.
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
        hooks: PipelineHooks | None = None,
    ) -> None:
        self.wanted, self.group_specs = resolve(features)
        if ranks is None:
            require_alone("a Runtime", "give each HostTable part=ranks.part() and the Runtime ranks=ranks")
        self.ranks, self.dense_exchange = ranks, dense_exchange
        require_depth(depth)
        if dense_exchange not in EXCHANGES:
            raise ValueError(f"dense_exchange must be one of {', '.join(EXCHANGES)}, not {dense_exchange!r}")
        require_parts(self.group_specs, ranks)
        require_seeds(self.group_specs, ranks)
        self.device = backend.require(device)
        require_place(self.group_specs, self.device)
        specs = cache_specs(cache, self.group_specs)
        require_room(self.group_specs, specs, depth, self.device)
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
        if ranks is not None:
            ranks.agree("runtime", "hostdev.Runtime(...)", alike.of_runtime(
                self.wanted, self.group_specs, device=self.device, depth=depth, dense_exchange=dense_exchange,
                windows=[None if group.cache is None else group.window for group in groups],
            ))  # fmt: skip
        self.pipeline = Pipeline(
            groups, self.staging, depth=depth, timeline=timeline, log=log, ranks=ranks, hooks=hooks
        )
        self.dense_channel = self.other_channels = self.step_channel = None
        if ranks is not None:
            self.step_channel = ranks.channel()
            same = ranks.mesh.data == ranks.size  # all ranks have the same parameters
            self.dense_channel = ranks.device_channel(self.device, None if same else "data")
            self.other_channels = None if same else (ranks.channel("data"), ranks.channel())
        self._loaders = WeakSet()
        self._begin_loops()
        self._frozen: set[str] = set()
        self._optimizer: TableOptimizer | None = None
        self._saved: RuntimeCheckpoints | None = None
        self._closed = False
        self.saves_with_framework = False  # with its checkpoints

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name."""
        return {table.name: table for group in self.group_specs for table in group.tables}

    @property
    def caches(self) -> list[EmbeddingCache]:
        """The caches of the groups that have one."""
        groups = [] if self._closed else self.pipeline.groups
        return [group.cache for group in groups if group.cache is not None]

    def exchanged_bytes(self) -> dict[str, int]:
        """Return the bytes sent to other ranks in training: for rows, the least that could have been, for the rest."""
        assert self.dense_channel is not None
        return {**self.pipeline.exchanged_bytes(), "dense": self.dense_channel.sent_bytes}

    @property
    def optimizer(self) -> TableOptimizer:
        """The tables' learning rates as a torch optimizer, for torch's schedulers: a parameter group for each table."""
        self._require_open()
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
        read_ahead: int | None = None,
        background: bool = False,
    ) -> TrainLoop:
        """Return an iterator of (batch, rows): each batch with its `Rows`, whose gradients go to the tables.

        batches     a DataLoader or any other iterable. It is read ahead of the loop, in the loop's thread, when the
                    loop comes back for the next batch. Batches that it has given must not be changed by reading others
        ids         returns a batch's ids by feature: integers [B] or [B, k], a `Bag`, or (values, lengths). Called as
                    each batch is read. None where the batches are dicts that have them under the features' names
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
        read_ahead  at most so many batches are read beyond the one that the loop has given out. None: `depth` steps,
                    and with a cache that looks ahead its window of steps besides; a step has `accumulate` or
                    `micro_batches` batches. 0: each is read when it is asked for
        background  read in a thread of its own, for a loader, `ids` and `send` that draw no random numbers from global
                    generators, write to no memory that they gave before, and use nothing that the loop's body uses

        What reading draws from the global generators of random numbers (torch's, NumPy's, Python's, the device's) comes
        from streams for each batch, seeded by the generators' states when the loop begins: it is the same at any depth.
        So is what the body draws. Only the first `next` of a new loader draws from the generators as they are.

        A table takes a step with a batch if a gradient has come to its rows by then. When a step is skipped, as there
        was no `backward`, nothing changes. Breaking off, or an error, ends the loop: what has been stepped is in the
        tables. Gradients that no step was taken with count in the next one, if the dense parameters keep theirs.
        Where `batches` is an iterator, such as a generator, it has been read further than the loop has come; the next
        loop over the same iterator gets those batches first. ValueError while another loop over these tables is open.
        """
        self._require_open()
        if accumulate < 1:
            raise ValueError(f"accumulate is a number of batches, not {accumulate}")
        require_read_ahead(read_ahead, background=background)
        if micro_batches is None and self.ranks is None:
            if reduce_early:
                raise ValueError("reduce_early is about micro-batches; say how many, with micro_batches=")
            reader = Reader(self.wanted, self.group_specs, ids, send, accumulate)
            return TrainLoop(self, batches, reader, read_ahead=read_ahead, background=background)
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
        return TrainLoop(
            self, batches, reader, micro_batches, reduce_early=reduce_early, by_step=by_step, read_ahead=read_ahead,
            background=background,
        )  # fmt: skip

    @property
    def _asks(self) -> bool:
        """Tell whether this rank looks up the rows of its samples."""
        return (self.ranks or ALONE_WORLD).leads

    def predict(
        self, batches: Iterable[Any], *, ids: IdsOf | None = None, send: Callable[[Any], Any] | None = None,
        micro_batches: int | None = None, features: Iterable[str] | None = None, read_ahead: int | None = None,
        background: bool = False,
    ) -> PredictLoop:  # fmt: skip
        """Return an iterator of (batch, rows) as `train` does, with rows that no gradient goes to; nothing changes.

        micro_batches  so many batches at once, as a `Step`; None: one after the other
        features       look up these features only, such as those of an item's tower: ids of others are not needed, and
                       not looked at; None: all of them
        read_ahead, background  as of `train`; `depth` steps are read ahead, with a cache, too

        Within a loop over `train` the tables are as after its last optimizer step. Where the loader has a length, the
        loop is over when the body of its last batch is left, or when that batch has been given out and another loop
        begins. With other ranks all of them call it, and have equally many batches. ValueError for features that the
        runtime does not have.
        """
        return self._predict(
            batches, ids, send, micro_batches, "predict", features=features, read_ahead=read_ahead,
            background=background,
        )  # fmt: skip

    def _predict(
        self, batches: Iterable[Any], ids: IdsOf | None, send: Callable[[Any], Any] | None, micro_batches: int | None,
        name: str, *, features: Iterable[str] | None, read_ahead: int | None = None, background: bool = False,
    ) -> PredictLoop:  # fmt: skip
        self._require_open()
        require_read_ahead(read_ahead, background=background)
        chosen = None if features is None else some_features(features, self.wanted)
        if chosen is not None:
            if micro_batches is not None:
                raise ValueError("features and micro_batches do not go together: stages need the rows of all features")
            ids = ids_of_some(chosen, ids, self.wanted)
        together = 1 if micro_batches is None else micro_batches
        reader = Reader(
            self.wanted, self.group_specs, ids, send, together, whole=micro_batches is not None, asks=self._asks
        )
        return PredictLoop(
            self, batches, reader, by_step=micro_batches is not None, features=chosen, read_ahead=read_ahead,
            background=background, name=name,
        )  # fmt: skip

    def look_up(self, ids: Mapping[str, Any], *, features: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the rows of one batch of ids, by feature, as `predict` gives them; without a pipeline.

        features  look up these only; None: all of them

        With other ranks all of them call it.
        """
        self._require_open()
        if self.ranks is not None:
            with self._predict([ids], None, None, None, "look_up", features=features) as loop:
                return dict(next(loop)[1])
        chosen = None if features is None else some_features(features, self.wanted)
        self._catch_up()
        if self._loop is not None:
            self.pipeline.write_back()
        ids_of = None if chosen is None else ids_of_some(chosen, None, self.wanted)
        request = Reader(self.wanted, self.group_specs, ids_of, None).request(ids)
        with torch.inference_mode(False), torch.no_grad():
            found = look_up(request, self.wanted, self.group_specs, self.device)
        return found if chosen is None else {name: found[name] for name in chosen}

    def close(self) -> None:
        """Release the tables: end the loops that are open, and wait for checkpoints that are being written.

        What has been stepped is in the tables, as when a loop is left. Again it does nothing; all else raises
        ValueError from now on. A `with` statement over the runtime calls it at its end.
        """
        if self._closed:
            return
        for loop in [self._loop, *self._predict_loops]:
            if loop is not None:
                loop.close()
        if self._saved is not None:
            self._saved.close()
        self._closed = True
        self.wanted, self.group_specs = [], []
        del self.pipeline, self.staging
        self._pending = self._saved = self._optimizer = None
        self._read_ahead, self._left = [], None
        self.raise_late()

    def __enter__(self) -> "Runtime":
        """Close it at the end of a `with` statement."""
        self._require_open()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this runtime is closed; make another one over its tables")

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
        self._require_open()
        known = self.tables
        for name in tables:
            if name not in known:
                raise ValueError(f"no table {name!r}; there are {', '.join(known)}")
        return set(tables or known)

    def write_back(self) -> None:
        """Bring the host tables up to date with all steps so far and with the caches, also in the middle of a loop."""
        self._require_open()
        self.raise_late()
        if (loop := self._loop) is not None:
            loop.submit()
        self.pipeline.write_back()

    def save(self, path: Path | str, *, extra: Any = None, keep: int = 3, wait: bool = True) -> "AsyncWriter":
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
        self._begin_call("save")
        self.write_back()
        return self._checkpoints.save(Path(path), extra, keep, wait=wait)

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
        self._require_open()
        self._close_abandoned()
        if self._loop is not None or self.predicting:
            raise ValueError("a loop over these tables is open; end it, or call its close(), before loading")
        self.raise_late()
        self._begin_call("load")
        self.pipeline.write_back()
        self._pending = None
        return self._checkpoints.load(Path(path), strict=strict)

    def _begin_call(self, name: str) -> None:
        """Begin something that all ranks do together."""
        (self.ranks or ALONE_WORLD).agree(name, f"runtime.{name}()")

    @property
    def is_saved(self) -> bool:
        """Tell whether the program saves the tables: it has done so, or has asked for Lightning's plugin."""
        return self.saves_with_framework or self._saved is not None

    @property
    def _checkpoints(self) -> "RuntimeCheckpoints":
        if self._saved is None:
            from hostdev.runtime.saving import RuntimeCheckpoints  # what it stands on takes time to load

            self._saved = RuntimeCheckpoints(self)
        return self._saved

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
