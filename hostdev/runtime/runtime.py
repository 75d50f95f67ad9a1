"""`Runtime`: embedding tables for any torch model and training loop."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload
from weakref import WeakSet

import torch

from hostdev.cache.cache import EmbeddingCache
from hostdev.core.launched import require_alone
from hostdev.core.machine import keep_freed_memory
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.primitive import OpLog
from hostdev.core.timeline import Timeline
from hostdev.device import backend
from hostdev.device.backend import limit_spinning
from hostdev.device.staging import Staging
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.pipeline.context import PipelineHooks
from hostdev.pipeline.pipeline import Pipeline, require_depth
from hostdev.runtime import placement
from hostdev.runtime.body_batch import Step
from hostdev.runtime.features import FeatureTables, Table, require_seeds, resolve, resolve_stacks
from hostdev.runtime.loaders import FrameworkLoaders
from hostdev.runtime.logged import Logged, RuntimeLog
from hostdev.runtime.lookup import get_ids_of_some, lookup_rows, some_features
from hostdev.runtime.loop import PredictLoop, StepOptions, TrainLoop, make_train_loop
from hostdev.runtime.open_loops import Access, Loops
from hostdev.runtime.reading import require_read_ahead
from hostdev.runtime.requests import B, GetCursor, GetIds, PredictKwargs, Reader, S, Send, TrainKwargs
from hostdev.runtime.rows import FeatureLayout, Rows, Value
from hostdev.runtime.spec import FeatureInput
from hostdev.runtime.table_optimizer import TableOptimizer, TableSettings

if TYPE_CHECKING:
    from hostdev.checkpoint.writer import AsyncWriter
    from hostdev.runtime.saving import RuntimeCheckpoints


class Runtime(Logged, FrameworkLoaders):
    """Embedding tables for a training loop: prefetches each batch's rows, and applies their gradients to the tables.

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

    Results are bit-identical for tables in device or host memory, and at any cache size, depth and number of threads.
    Tables that the same features look up form a group with one cache. Sums are taken in the order of the features and,
    within a feature, in the order of its ids.

    Args:
        features: A dict from feature names to tables: a table, a tuple of tables that are looked up with the same ids,
            or a `Feature` of these. Several features may share a table.
        stacks: Features that the model gets as one tensor [B, F, D] under a new name, {name: [feature, ...]}, like the
            result of `torch.stack` but without a copy.
        device: The device that receives the rows: "auto", "cpu", "cuda", ..., or a torch.device.
            On the CPU, a Runtime affects the whole process: torch's idle threads spin for a shorter time, unless
            GOMP_SPINCOUNT or OMP_WAIT_POLICY is set, and glibc keeps freed memory, unless its own variables are set.
        cache: Size of the cache of hot rows on the device: a number of rows, a share of each table such as "10%", or
            a `CacheSpec`; or a dict of these by table name. Tables that are looked up with the same ids share a cache.
        depth: Number of batches to read and look up ahead of the current one; 0 runs the pipeline's stages serially.
        ranks: The ranks of this run (`hostdev.parallel`), each with a part of every table; all must create their
            runtimes in the same order. None for a process without other ranks; if a launcher has started several
            processes, such a process must call `hostdev.alone()` first.
        dense_exchange: How ranks sum the gradients of `Rows.reduce`: "tree", in an order that does not depend on the
            number of ranks, or "all-reduce", as DistributedDataParallel does.
        log: Records the duration of every operation.
        timeline: Records the duration of every stage.
        hooks: Changes to the pipeline, for tests and `hostdev.verify`.

    Raises:
        UserError: The device is missing, there is not enough memory, or `ranks` is missing in one of several
            processes.
        TypeError, ValueError: An argument is wrong.
    """

    def __init__(
        self,
        features: Mapping[str, FeatureTables],
        *,
        device: torch.device | str = "auto",
        cache: placement.CacheSize | Mapping[str, placement.CacheSize | None] | None = None,
        depth: int = 2,
        ranks: World | None = None,
        stacks: Mapping[str, list[str]] | None = None,
        dense_exchange: str = EXCHANGES[0],
        log: OpLog | None = None,
        timeline: Timeline | None = None,
        hooks: PipelineHooks | None = None,
    ) -> None:
        self.bindings, self.group_specs = resolve(features)
        self.stacks = resolve_stacks(stacks, self.bindings)
        self.layout = FeatureLayout(self.bindings, self.group_specs, self.stacks)
        if ranks is None:
            require_alone("a Runtime", "give each HostTable part=ranks.part() and the Runtime ranks=ranks")
        self.world: World = ranks or ALONE_WORLD
        self.dense_exchange = dense_exchange
        require_depth(depth)
        if dense_exchange not in EXCHANGES:
            raise ValueError(f"dense_exchange must be one of {', '.join(EXCHANGES)}, not {dense_exchange!r}")
        placement.require_parts(self.group_specs, self.world)
        require_seeds(self.group_specs, self.world)
        placement.agree_on_capacity(self.group_specs, self.world)
        self.device = backend.require(device)
        # Waiting threads of torch would take the kernels' cores, and new memory in each step would cost page faults.
        if self.device.type == "cpu":
            limit_spinning()
            keep_freed_memory()
        placement.require_place(self.group_specs, self.device)
        specs = placement.cache_specs(cache, self.group_specs)
        placement.require_room(self.group_specs, specs, depth, self.device)
        self.log = log = log or OpLog()
        self.staging = Staging(self.device, log, batches=depth + 2)
        groups = placement.make_groups(self.group_specs, specs, self.device, self.world, log)
        caches = [group.cache.describe() for group in groups]
        settings = placement.get_settings(
            self.bindings, self.stacks, self.group_specs, self.device.type, depth, dense_exchange, caches
        )
        self.world.agree("runtime", "hostdev.Runtime(...)", settings)
        self.pipeline = Pipeline(
            groups, self.staging, depth=depth, timeline=timeline, log=log, world=self.world, hooks=hooks
        )
        self.step_channel = self.world.channel()
        same = not self.world.has_parts  # whether all ranks have the same parameters
        self.dense_channel = self.world.device_channel(self.device, None if same else "data")
        self.other_channels = None if same else (self.world.channel("data"), self.world.channel())
        self.loaders = WeakSet()
        self.settings = TableSettings(self.tables.values())
        self.loops = Loops(self.group_specs, self.pipeline, self.settings, Access(self), self.loaders)
        self._saved: RuntimeCheckpoints | None = None
        self._closed = False
        self.saves_with_framework = False  # whether a framework's checkpoints include the tables

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name."""
        return {table.name: table for group in self.group_specs for table in group.tables}

    @property
    def cursor(self) -> Any:  # Any: the program's own tree
        """The result of `train`'s `cursor` for the last batch that is done, or the cursor of a loaded checkpoint.

        A batch is done when its step is in the tables, or the loop continued without a step. Batches that are only read
        ahead are not done. None if no loop had a `cursor`. With other ranks, `save` saves rank 0's cursor.
        """
        self.require_open()
        return self.loops.cursor

    def _add_log(self, make: Callable[[], RuntimeLog]) -> None:
        self.require_open()
        self.loops.add_log(make())

    @property
    def caches(self) -> list[EmbeddingCache]:
        """The caches of the groups that have one."""
        groups = [] if self._closed else self.pipeline.groups
        return [group.cache for group in groups if group.is_cached]

    def exchanged_bytes(self) -> dict[str, int]:
        """Return bytes sent in training: "rows", "least" (minimum for "rows"), "dense", "network" (to other hosts).

        Without other ranks, the dict is empty.
        """
        dense, sent = self.dense_channel, {}
        for exchange in self.pipeline.exchanges:
            network = exchange.network_bytes + dense.network_bytes
            sent = {"rows": exchange.sent_bytes, "least": exchange.least_bytes, "network": network}
            sent["dense"] = dense.sent_bytes
        return sent

    @property
    def optimizer(self) -> TableOptimizer:
        """A torch optimizer with one parameter group per table, for torch's schedulers and scalers."""
        self.require_open()
        return self.loops.make_optimizer()

    @overload
    def train(
        self, batches: Iterable[B], *, ids: GetIds[B] | None = None, send: None = None, **options: Unpack[TrainKwargs]
    ) -> TrainLoop[tuple[B, Rows]]: ...
    @overload
    def train(
        self, batches: Iterable[B], *, ids: GetIds[B] | None = None, send: Send[B, S], **options: Unpack[TrainKwargs]
    ) -> TrainLoop[tuple[S, Rows]]: ...
    @overload
    def train(
        self,
        batches: Iterable[B],
        *,
        ids: GetIds[B] | None = None,
        send: Send[B, S],
        cursor: GetCursor[B] | None = None,
        by_step: Literal[True],
        micro_batches: int | None = None,
        background: bool = False,
    ) -> TrainLoop[Step]: ...
    def train(
        self,
        batches: Iterable[Any],  # Any: the overloads have the types
        *,
        ids: GetIds[Any] | None = None,
        send: Callable[[Any], Any] | None = None,
        cursor: GetCursor[Any] | None = None,
        by_step: bool = False,
        accumulate: int = 1,
        micro_batches: int | None = None,
        reduce_early: bool = False,
        read_ahead: int | bool | None = None,
        background: bool = False,
    ) -> TrainLoop[Any]:
        """Return an iterator of (batch, rows): each batch with its `Rows`, whose gradients update the tables.

        While a batch is read, draws from the global random number generators (torch's, NumPy's, Python's, the device's)
        come from a stream for that batch, seeded by the generators' states when the loop begins. These draws are the
        same at any depth, and so are those of the body. Only the first `next` of a new loader draws from the generators
        themselves.

        A table is updated only if its rows received a gradient. A step without `backward` is skipped and changes
        nothing. Without a dense optimizer, a batch's step is taken when the loop goes on, or by
        `runtime.optimizer.step()`. After a `break` or an error the loop is over, and the tables contain all finished
        steps; gradients without a step are dropped, and the next use of the tables warns. The next loop over the same
        iterator, such as a generator, replays the unused batches first.

        Args:
            batches: A DataLoader or another iterable. It is read ahead of the body, in the loop's thread, each time
                the loop goes on to the next batch. Reading a batch must not change earlier ones.
            ids: Returns a batch's ids by feature: integers [B] or [B, k], a `Bag`, or (values, lengths[, weights]).
                Called when a batch is read. None if batches are dicts that have the ids under the features' names.
            send: Returns the parts of a batch that the loop needs, in any structure of tuples, lists and dicts, whose
                tensors and arrays are copied to the device in the background. None to yield the batch itself.
            cursor: Returns the program's position after a batch, such as its offsets in a stream, as a new tree of
                dicts, lists, numbers and text. It may depend only on the batch, since the loader may be further ahead.
                `save` saves the cursor of the last batch whose step is in the checkpoint, see `Runtime.cursor`.
            by_step: With other ranks, yield all micro-batches of a step together, as a `Step`, for pipeline stages.
            accumulate: Number of batches whose gradients are summed for one step; their rows are looked up and updated
                once.
            micro_batches: Like `accumulate`, but gradients are summed in an order that does not depend on which rank
                computes which batch; each batch needs a `Rows.reduce`. With other ranks, the number of micro-batches
                per step on this rank. None means 1 with other ranks, and no micro-batches otherwise.
            reduce_early: With other ranks, whether to exchange a parameter's gradient as soon as the last micro-batch's
                backward pass has computed it, as DistributedDataParallel does, instead of in `reduce`. If so, until
                `reduce` nothing may change the gradient, and the loop must not be left.
            read_ahead: Maximum number of batches to read ahead of the body, or True for `depth` steps, plus the window
                of a cache that looks ahead or of a table on disk; a step has `accumulate` or `micro_batches` batches. 0
                reads a step's batches when the loop goes on to that step. None means True if the loader, `ids` and
                `send` are known to have no random generators of their own: lists, torch's loaders, functions (also
                with `yield`) that use only data, and objects that declare `own_generators = False`. Otherwise it
                means 0, with a warning.
            background: Read batches in another thread. The loader, `ids` and `send` must then not draw from random
                number generators, write to memory that they have returned, or share objects with the body.

        Raises:
            ValueError: Another loop over these tables is open, or options contradict each other.
        """
        self.require_open()
        reading: dict[str, Any] = {"read_ahead": read_ahead, "background": background}
        together = StepOptions(accumulate, micro_batches, by_step=by_step, reduce_early=reduce_early)
        return make_train_loop(self, batches, (ids, send, cursor), together, reading)

    @overload
    def predict(
        self, batches: Iterable[B], *, ids: GetIds[B] | None = None, send: None = None, **options: Unpack[PredictKwargs]
    ) -> PredictLoop[tuple[B, Rows]]: ...
    @overload
    def predict(
        self, batches: Iterable[B], *, ids: GetIds[B] | None = None, send: Send[B, S], **options: Unpack[PredictKwargs]
    ) -> PredictLoop[tuple[S, Rows]]: ...
    @overload
    def predict(
        self,
        batches: Iterable[B],
        *,
        ids: GetIds[B] | None = None,
        send: Send[B, S],
        micro_batches: int,
        background: bool = False,
    ) -> PredictLoop[Step]: ...
    def predict(
        self,
        batches: Iterable[Any],  # Any: the overloads have the types
        *,
        ids: GetIds[Any] | None = None,
        send: Callable[[Any], Any] | None = None,
        micro_batches: int | None = None,
        features: Iterable[str] | None = None,
        read_ahead: int | bool | None = None,
        background: bool = False,
    ) -> PredictLoop[Any]:
        """Return an iterator of (batch, rows) like `train`, but without gradients; the tables do not change.

        Within a loop over `train`, the rows have the values after that loop's last optimizer step. If the loader has a
        length, the loop ends when the body of the last batch ends, or when another loop begins after that batch was
        yielded. With other ranks, every rank must call `predict`, with the same number of batches.

        Args:
            batches: As for `train`.
            ids: As for `train`.
            send: As for `train`.
            micro_batches: Yield this many batches together, as a `Step`; None to yield one at a time.
            features: Look up only these features, for example an item tower's; other features' ids are neither needed
                nor checked. None for all features.
            read_ahead: As for `train`, but True means `depth` steps even with a cache.
            background: As for `train`.

        Raises:
            ValueError: The runtime lacks one of `features`, or `features` and `micro_batches` are both given.
        """
        self.require_open()
        require_read_ahead(read_ahead, background=background)
        chosen = None if features is None else some_features(features, self.bindings, self.stacks)
        if chosen is not None and micro_batches is not None:
            raise ValueError("features and micro_batches cannot be combined: micro_batches looks up all features")
        how = {"features": chosen, "read_ahead": read_ahead, "background": background}
        return self._make_predict_loop(batches, ids, send, micro_batches, **how)  # type: ignore[arg-type]

    def _make_predict_loop(
        self,
        batches: Iterable[Any],
        ids: GetIds[Any] | None,
        send: Callable[[Any], Any] | None,
        micro_batches: int | None,
        *,
        features: list[str] | None,
        **how: Any,
    ) -> PredictLoop[Any]:
        known = self.bindings, self.stacks
        get_ids: GetIds[Any] | None = ids if features is None else get_ids_of_some(features, ids, *known)
        by_step = micro_batches is not None
        reader = Reader(
            self.bindings, self.group_specs, get_ids, send, micro_batches or 1, whole=by_step, asks=self.world.leads
        )
        return PredictLoop(self, batches, reader, by_step=by_step, features=features, **how)

    def lookup(self, ids: Mapping[str, FeatureInput], *, features: Iterable[str] | None = None) -> dict[str, Value]:
        """Return the rows of one batch of ids, by feature, as `predict` does, but without a pipeline.

        With other ranks, every rank must call `lookup`.

        Args:
            ids: Each feature's ids, in the form that `ids` of `train` returns.
            features: Look up only these features; None for all.
        """
        self.require_open()
        chosen = None if features is None else some_features(features, self.bindings, self.stacks)
        if self.world.size > 1:
            with self._make_predict_loop([ids], None, None, None, features=chosen, name="lookup") as loop:
                return dict(next(loop)[1])
        self.loops.catch_up()
        self.loops.dense.require_same()
        if self.loops.training is not None:
            self.pipeline.write_back()
        known = self.bindings, self.stacks
        get_ids: GetIds[Any] | None = None if chosen is None else get_ids_of_some(chosen, None, *known)
        request = Reader(self.bindings, self.group_specs, get_ids, None).request(ids)
        with torch.inference_mode(False), torch.no_grad():
            found = lookup_rows(request, self.bindings, self.group_specs, self.device, self.stacks)
        return found if chosen is None else {name: found[name] for name in chosen}

    def freeze(self, *tables: str) -> None:
        """Freeze these tables (by default all) from the next batch on: they get no gradients and do not change."""
        self.require_open()
        self.settings.freeze(tables)
        self.loops.replan()

    def unfreeze(self, *tables: str) -> None:
        """Undo `freeze`."""
        self.require_open()
        self.settings.unfreeze(tables)
        self.loops.replan()

    def write_back(self) -> None:
        """Write the updates of all steps so far, and cached rows, to the host tables; also allowed within a loop."""
        self.require_open()
        self.loops.raise_late()
        if (loop := self.loops.training) is not None:
            loop.submit()
        self.pipeline.write_back()

    def save(
        self,
        path: Path | str,
        *,
        extra: Any = None,  # Any: the program's own tree, checked when it is written
        keep: int = 3,
        wait: bool = True,
    ) -> "AsyncWriter":
        """Save a checkpoint of all tables, with optimizer state and steps (docs/internals/checkpoint-format.md).

        Within a loop, the checkpoint includes the body's batch if the dense optimizer has stepped with it; the loop
        keeps its prefetched batches. The checkpoint also has the `cursor`. It is full or, in a folder that has
        checkpoints of this runtime, incremental, with only the rows written since the last one. Training may continue
        while it is written.

        Args:
            path: The checkpoint folder, or its address in a store (docs/guides/stores.md).
            extra: Values to save with the tables, such as `state_dict`s of the dense layers, their optimizer and
                schedulers: dicts, lists, tensors, numbers and strings.
            keep: Number of newest checkpoints to keep in the folder, 1 or more; checkpoints on which incremental ones
                build are kept, too.
            wait: Whether to wait until the checkpoint is written. If not, `wait()` of the returned object waits, and
                raises errors; the program also waits before it exits. An error that was not raised this way becomes a
                warning in the next `save` or `load`, or a line on standard error at exit.

        Raises:
            OSError: The checkpoint cannot be written.
            TypeError: `extra` has a value that cannot be saved.
            ValueError: `keep` is not a number of checkpoints, 1 or more.
            UserError: The folder cannot be created, or another process writes to it.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be a number of checkpoints, 1 or more, not {keep!r}")
        self.world.agree("save", "runtime.save()", placement.get_erasures(list(self.tables.values())))
        self.write_back()
        self.loops.dense.require_same()
        return self._checkpoints.save(path, extra, keep, wait=wait)

    def load(self, path: Path | str, *, strict: bool = True) -> Any:  # Any: the `extra` of `save`
        """Load a checkpoint, or the newest complete one in a folder; return its `extra`, and set `cursor`.

        With `strict`, if all tables are unused host tables and there are no other ranks, files are checked while they
        are loaded, and an error or Ctrl-C resets the tables to their initial values. Otherwise all files are checked
        before a table changes, but Ctrl-C may leave some of the checkpoint's rows in the tables. If the newest
        checkpoint is damaged, the previous one is loaded with a warning.

        Args:
            path: A checkpoint, or a folder of checkpoints, on disk or in a store.
            strict: False loads only the tables that both the checkpoint and the runtime have, with the checkpoint's
                steps, learning rates and seeds. A table may have more rows than in the checkpoint; the additional rows
                keep their values. Warnings name everything that is not loaded. The next checkpoint is full.

        Raises:
            UserError: The checkpoint has different tables, `save` did not write it, or no checkpoint is complete.
            ValueError: A loop is open.
        """
        self.require_open()
        self.loops.require_closed("loading")
        self.world.agree("load", "runtime.load()")
        self.pipeline.write_back()
        extra = self._checkpoints.load(path, strict=strict)
        self.loops.dense.note_load()
        return extra

    @property
    def is_saved(self) -> bool:
        """Whether the program saves or loads the tables' checkpoints, itself or through Lightning's plugin."""
        return self.saves_with_framework or self._saved is not None

    @property
    def _checkpoints(self) -> "RuntimeCheckpoints":
        if self._saved is None:
            from hostdev.runtime.saving import RuntimeCheckpoints  # its imports are slow

            self._saved = RuntimeCheckpoints(self)
        return self._saved

    def close(self) -> None:
        """End the open loops, wait for checkpoints that are being written, and release the tables.

        The tables then contain all finished steps. A second call does nothing; other methods raise ValueError. A `with`
        statement over the runtime calls `close` at its end.
        """
        if self._closed:
            return
        self.loops.close()
        if self._saved is not None:
            self._saved.close()
        self._closed = True
        self.bindings, self.group_specs, self.stacks = [], [], []
        loops = self.loops
        del self.pipeline, self.staging, self.settings, self.loops
        self._saved = None
        loops.raise_late()

    def __enter__(self) -> "Runtime":
        """Return the runtime; it is closed at the end of the `with` statement."""
        self.require_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def require_open(self) -> None:
        """Raise ValueError if the runtime is closed."""
        if self._closed:
            raise ValueError("this runtime is closed; create a new Runtime with the same tables")
