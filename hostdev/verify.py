"""python -m hostdev.verify: train a few steps in every mode on the user's data, and compare all bits of every step."""

if __name__ == "__main__":  # first of all, as imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.commands.verify", "hostdev.verify"))

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hostdev.cache.cache import CacheTooLargeError
from hostdev.cache.options import WINDOW
from hostdev.core import cli
from hostdev.core.progress import bar
from hostdev.data import lookalike, manifest
from hostdev.data.batch import Batch
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.kernels.buffers import identity
from hostdev.kernels.fingerprint import hash_rows
from hostdev.kernels.pool import host_threads, set_host_threads
from hostdev.models.model import Model
from hostdev.parallel.layout import Layout, settle
from hostdev.parallel.mesh import Mesh
from hostdev.parallel.plan import divides, pairable
from hostdev.parallel.plan_text import STRATEGIES
from hostdev.parallel.ranks import Ranks
from hostdev.parallel.state import DenseState
from hostdev.runtime.digest import dense_arrays
from hostdev.runtime.spec import CacheSpec
from hostdev.train import config
from hostdev.train.build import device_of, groups_of, ids_of, model_of, seed_torch, vector_tables
from hostdev.train.config import TrainConfig
from hostdev.train.staged import inputs_like
from hostdev.train.trainer import Trainer

DEPTHS = (1, 2, 4)
_FAULT_SECONDS = 0.03  # by which an update is held up, so that a lookup that does not wait for it comes before it

Hashes = npt.NDArray[np.uint64]
Step = dict[str, tuple[npt.NDArray[Any], Hashes]]  # by tensor: ids of rows, in no order, and a hash of each row


class Mode(NamedTuple):
    """One way to train."""

    host_device_mix: bool
    depth: int
    threads: int
    cache: str | None = None  # the share of rows; "some": another one for each group, and none for the first
    policy: str = "lookahead"

    def __str__(self) -> str:
        tables = "host tables" if self.host_device_mix else "device tables"
        cache = f"cache {self.cache} {self.policy}" if self.cache is not None else ""
        threads = f"{self.threads} host thread{'s' * (self.threads > 1)}"
        return f"{tables:<14}{f'depth {self.depth}':<10}{threads:<16}{cache:<21}"


class Record(NamedTuple):
    """What a run left behind: per step, each tensor's ids of rows, and a hash of each row; the losses; the digest; and
    the dense layers' weights at the end.
    """

    steps: list[Step]
    losses: list[tuple[float, ...]]
    digest: str
    weights: Mapping[str, npt.NDArray[Any]] = {}


class Difference(NamedTuple):
    """The first place in which two runs differ."""

    step: int
    tensor: str
    row: int | None

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        return f"first difference: step {self.step}, {self.tensor}{row}"


def modes(threads: int, groups: int = 1) -> Iterator[Mode]:
    """Yield the ways to train a model with so many groups of tables, the reference first."""
    yield Mode(True, 0, threads)
    if threads > 1:
        yield Mode(True, 0, 1)
    for depth in DEPTHS:
        yield Mode(True, depth, threads)
    if threads > 1:
        yield Mode(True, DEPTHS[1], 1)
    for depth in (0, DEPTHS[1]):
        yield Mode(True, depth, threads, "10%")
    for cache, policy in (
        ("1%", "lookahead"),
        ("100%", "lookahead"),
        ("10%", "lru"),
        ("10%", "lfu"),
        ("10%", "static"),
        *([("some", "and none")] if groups > 1 else []),
    ):
        yield Mode(True, DEPTHS[1], threads, cache, policy)
    if threads > 1:
        yield Mode(True, DEPTHS[1], 1, "10%")
    yield Mode(False, 0, threads)
    yield Mode(False, DEPTHS[1], threads)


def caches(mode: Mode, model: Model, batches: Sequence[Batch]) -> dict[str, CacheSpec] | None:
    """Return the cache of each group in a mode."""
    if mode.cache is None:
        return None
    specs = {}
    for number, tables in enumerate(groups_of(model)):
        rows, policy = mode.cache, mode.policy
        if rows == "some":
            if not number:
                continue
            rows, policy = (("10%", "lookahead"), ("5%", "lru"), ("30%", "lfu"))[number % 3]
        counts = _count(model, batches, tables[0]) if policy == "static" else None
        specs[tables[0]] = CacheSpec(rows, policy, window=WINDOW if number % 2 == 0 else 3, counts=counts)
    return specs


def train(
    settings: TrainConfig, mode: Mode, batches: Sequence[Batch], schema: Schema, broken: int | None,
    micro_batches: int = 1, ranks: Ranks | None = None, layout: Layout | None = None,
) -> Record:  # fmt: skip
    """Train on batches, or with other ranks on this one's parts of them, and record every step, of the rows here.

    broken  a group whose reads do not wait for the updates of earlier batches: what is to be caught
    layout  how the ranks share out the network, where they have parts of it
    """
    set_host_threads(mode.threads)
    record = Record([{} for _ in batches], [], "")
    ids_here: list[Any] = []  # of the rows of each group; None where all are
    names: list[list[Any]] = []  # of the tables, by group; the trainer itself would be kept by what it calls
    seed_torch(settings.seed)
    model = model_of(settings, schema)

    def after_update(number: int, group: int, ids: Any, places: list[tuple[Any, Any]]) -> None:
        if ids_here[group] is not None:
            ids = ids_here[group][ids]
        for (name, slots), (block, at) in zip(names[group], places, strict=True):
            _add_rows(record.steps[number - 1], name, slots, ids, block, at)

    def hold_up(stage: str, number: int) -> None:
        if stage == "update":
            time.sleep(_FAULT_SECONDS)

    fault: dict[str, Any] = {"ignore_hazards": [broken], "before_stage": hold_up} if broken is not None else {}
    trainer = Trainer(
        model, host_device_mix=mode.host_device_mix, device=backend.select(settings.device), l2=settings.l2,
        precision=settings.precision, seed=settings.seed, lr=settings.lr, depth=mode.depth,
        cache=caches(mode, model, batches), after_update=after_update, micro_batches=micro_batches, ranks=ranks,
        layout=layout, sample=batches[0], **fault,
    )  # fmt: skip
    for group in trainer.runtime.group_specs:
        names.append([(table.name, ["weights", *table.slots]) for table in group.tables])
        table = group.tables[0]
        ids_here.append(None if ranks is None else table.ids(0, table.rows))  # type: ignore[union-attr]
    with bar(len(batches), str(mode), "step") as progress:
        for number, result in enumerate(trainer.train(batches)):
            record.losses.append(tuple(result.value))
            record.steps[number] |= _hash_dense(trainer.dense_state())
            progress.update()
    dense = trainer.dense_state()
    weights = {name: dense.model[name].detach().cpu().float().numpy().copy() for name in dense.names}
    return record._replace(digest=trainer.state_sha256(), weights=weights)


def _count(model: Model, batches: Sequence[Batch], table: str) -> npt.NDArray[np.int64]:
    """How often each row of a table is used."""
    counts = np.zeros(model.tables[table].rows, np.int64)
    for batch in batches:
        counts += np.bincount(ids_of(model, batch, table), minlength=len(counts))
    return counts


def _add_rows(step: Step, table: str, slots: Sequence[str], ids: Any, block: Any, at: Any) -> None:
    """Add rows' hashes to a step's: some are on the host, others in a cache."""
    if isinstance(block, torch.Tensor):
        block = block.index_select(0, at.to(block.device)).cpu().numpy()
        at = identity(len(block))
    if isinstance(ids, torch.Tensor):
        ids = ids.cpu().numpy()
    hashes = hash_rows(block, at)
    for i, name in enumerate(slots[: hashes.shape[1]]):  # slots of one value a row are in the digest alone
        key = f"{table}/{name}"
        before = step.get(key, (ids[:0], hashes[:0, i]))
        step[key] = (np.concatenate([before[0], ids]), np.concatenate([before[1], hashes[:, i]]))


def _hash_dense(dense: DenseState) -> Step:
    """Return the hashes of a dense side's rows; none where another rank has brought it together."""
    tensors: Step = {}
    for name, value, _ in dense_arrays(dense):
        rows = value.float().cpu().numpy().reshape(value.shape[0] if value.ndim else 1, 1, -1)
        ids = identity(len(rows))
        tensors[f"dense/{name}"] = (ids, hash_rows(np.ascontiguousarray(rows), ids)[:, 0])
    return tensors


def compare(reference: Record, other: Record) -> Difference | None:
    """Return the first step, tensor and row in which another run differs; None if there is none."""
    for step, (ours, theirs) in enumerate(zip(reference.steps, other.steps, strict=True), 1):
        for tensor in sorted(ours, key=_is_dense):  # the rows that a fault begins with before what comes of it
            (ids, hashes), (their_ids, their_hashes) = _in_order(ours[tensor]), _in_order(theirs[tensor])
            wrong = np.flatnonzero(hashes != their_hashes) if np.array_equal(ids, their_ids) else identity(1)
            if len(wrong):
                return Difference(step, tensor, int(ids[wrong[0]]))
        if reference.losses[step - 1] != other.losses[step - 1]:
            return Difference(step, "losses", None)
    if reference.digest != other.digest:
        return Difference(len(reference.steps), "a row that no batch uses", None)
    return None


def _is_dense(tensor: str) -> bool:
    return tensor.startswith("dense/")


def _in_order(rows: tuple[npt.NDArray[Any], Hashes]) -> tuple[npt.NDArray[Any], Hashes]:
    order = np.argsort(rows[0], kind="stable")
    return rows[0][order], rows[1][order]


def size_of(settings: TrainConfig, reader: ShardReader, steps: int) -> int:
    """Return the rows of a step."""
    reader.require(settings.batch_size or 1)
    return settings.batch_size or min(config.REFERENCE_BATCH_SIZE, -(-reader.rows // steps))


def batches_of(reader: ShardReader, size: int, seed: int, steps: int, part: tuple[int, int] = (0, 1)) -> list[Batch]:
    """Return the batches of so many steps, or parts of them."""
    epochs = (reader.batches(size, seed=seed, epoch=epoch, part=part) for epoch in itertools.count(1))
    return list(itertools.islice(itertools.chain.from_iterable(epochs), steps))


def verify(
    settings: TrainConfig, steps: int, *, fault: bool, report: Callable[[str], None] = print,
    meshes: Sequence[Mesh] = (), layout: Layout | None = None, micro_batches: int = 1,
) -> list[int]:  # fmt: skip
    """Train in every mode and report how each compares with the serial run.

    meshes   of processes, which share out so many micro-batches: to be compared with one process
    layout   of the network on those that share it out, too
    fault    break the rule that a batch sees a row only after every earlier batch's update of it, in each group in turn
    returns  how many modes differ; with faults, of each group
    """
    data = settings.data or lookalike.ensure()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
    size = size_of(settings, reader, steps)
    device = device_of(settings.device, tf32=settings.tf32)
    batches = batches_of(reader, size, settings.seed, steps)
    model = model_of(settings, found.schema)
    laid_out = [(mesh, layout_on(mesh, layout or Layout(), model, batches[0])) for mesh in meshes]
    groups, dims = groups_of(model), sorted({spec.dim for spec in vector_tables(model).values()})
    report(f"data     {data}: {steps} steps of {size:,} rows, {found.schema.rows:,} ids")
    report(f"model    {settings.model}: " + "; ".join(" and ".join(tables) for tables in groups))
    report(f"dense    {settings.arithmetic} on {backend.describe(device)}; D = {', '.join(map(str, dims))}, "
           f"l2 {settings.l2}\n")  # fmt: skip
    if settings.l2 == "table":
        report("--l2 table does not go with a cache: no mode with one is run\n")
    report(f"{'tables':<14}{'pipeline':<10}{'':<37}state_sha256")
    ways = list(modes(settings.host_threads or host_threads(), len(groups)))
    reference, *others = [mode for mode in ways if mode.cache is None or settings.l2 != "table"]
    expected = train(settings, reference, batches, found.schema, None)
    report(f"{reference!s}{expected.digest[:16]}  the reference")
    if not fault:
        different = [_compare_all(settings, others, batches, found.schema, None, expected, report)]
        if meshes:
            from hostdev.verify_processes import compare_meshes

            different[0] += compare_meshes(settings, reference, batches, found.schema, laid_out, micro_batches, report)
        return different
    overlapped = [mode for mode in others if mode.host_device_mix and mode.depth]
    different = []
    for number, tables in enumerate(groups):
        if len(groups) > 1:
            report(f"a fault in {' and '.join(tables)}")
        different.append(_compare_all(settings, overlapped, batches, found.schema, number, expected, report))
    return different


def layout_on(mesh: Mesh, layout: Layout, model: Model, sample: Batch) -> Layout:
    """Return what of a layout is about a mesh, layers in pairs where it has no plan; UserError if it does not fit."""
    inputs = partial(inputs_like, model, sample, None)
    plan = layout.plan
    if mesh.model > 1 and not plan:
        modules, taken = dict(model.named_modules()), set[str]()
        for pair in sorted(pairable(model, lambda: inputs(2))):
            able = all(divides(modules[name], how, mesh.model) for name, how in zip(pair, STRATEGIES, strict=False))
            if able and not taken.intersection(pair):
                taken.update(pair)
                plan = [*plan, *zip(pair, STRATEGIES, strict=False)]
    mine = Layout(layout.schedule, layout.begins if mesh.pipe > 1 else None, plan if mesh.model > 1 else ())
    if mesh.size > mesh.data:
        settle(model, mine, mesh, inputs)
    return mine


def _compare_all(
    settings: TrainConfig, ways: Sequence[Mode], batches: Sequence[Batch], schema: Schema, broken: int | None,
    expected: Record, report: Callable[[str], None],
) -> int:  # fmt: skip
    """Train in these modes, report how each compares, and return how many differ."""
    different = 0
    for mode in ways:
        gc.collect()  # torch's first steps leave frames behind, which keep tables; there are up to 16 modes
        try:
            record = train(settings, mode, batches, schema, broken)
        except CacheTooLargeError as error:
            report(f"{mode!s}not run: {error}")
            continue
        difference = compare(expected, record)
        different += difference is not None
        report(f"{mode!s}{record.digest[:16]}  {difference or 'equal'}")
    return different
