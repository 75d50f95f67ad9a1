"""The modes of training that `hostdev verify` compares, and the record of a run in one of them."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hostdev.cache.options import WINDOW
from hostdev.core import registry
from hostdev.core.progress import bar
from hostdev.data.batch import Batch
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.distributed.dense import DenseState
from hostdev.distributed.world import ALONE_WORLD, Layout, World
from hostdev.ext.training.starting import make_model
from hostdev.kernels.arrays import identity
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.xxhash import hash_rows
from hostdev.models.model import Model
from hostdev.pipeline.context import PipelineHooks
from hostdev.runtime.digest import dense_arrays
from hostdev.runtime.spec import CacheSpec
from hostdev.train.build import groups_of, ids_of, seed_torch
from hostdev.train.options import REFERENCE_BATCH_SIZE, TrainConfig
from hostdev.train.trainer import StepSettings, Trainer

DEPTHS = (1, 2, 4)
_FAULT_SECONDS = 0.03  # delay of an update, so that a lookup that does not wait for the update reads old rows

Hashes = npt.NDArray[np.uint64]
Step = dict[str, tuple[npt.NDArray[Any], Hashes]]  # by tensor: ids of rows, unordered, and a hash of each row


class Mode(NamedTuple):
    """A training mode."""

    host_device_mix: bool
    depth: int
    threads: int
    cache: str | None = None  # share of the rows; "some": none for the first group, different shares for the others
    policy: str = "lookahead"
    on_disk: bool = False  # whether rows that do not fit in --table-memory are on disk

    def __str__(self) -> str:
        tables = "host tables" if self.host_device_mix else "device tables"
        tables = "disk tables" if self.on_disk else tables
        cache = f"cache {self.cache} {self.policy}" if self.cache is not None else ""
        threads = f"{self.threads} host thread{'s' * (self.threads > 1)}"
        return f"{tables:<14}{f'depth {self.depth}':<10}{threads:<16}{cache:<21}"


class Record(NamedTuple):
    """The record of a run; `weights` has the dense layers' weights after the last step."""

    steps: list[Step]
    losses: list[tuple[float, ...]]
    digest: str
    weights: Mapping[str, npt.NDArray[Any]] = {}


class Difference(NamedTuple):
    """The first step, tensor and row in which two runs differ."""

    step: int
    tensor: str
    row: int | None

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        return f"first difference: step {self.step}, {self.tensor}{row}"


def modes(threads: int, groups: int = 1, *, by_key: bool = False) -> Iterator[Mode]:
    """Yield the modes to compare, for a model with `groups` groups of tables; the first mode is the reference.

    With `by_key`, modes with device tables or with the policy "static" are left out.
    """
    for mode in _all_modes(threads, groups):
        if not by_key or (mode.host_device_mix and mode.policy != "static"):
            yield mode


def _all_modes(threads: int, groups: int) -> Iterator[Mode]:
    yield Mode(True, 0, threads)
    if threads > 1:
        yield Mode(True, 0, 1)
    for depth in DEPTHS:
        yield Mode(True, depth, threads)
    if threads > 1:
        yield Mode(True, DEPTHS[1], 1)
    for depth in (0, DEPTHS[1]):
        yield Mode(True, depth, threads, "10%")
    policies = ("1%", "lookahead"), ("100%", "lookahead"), ("10%", "lru"), ("10%", "lfu"), ("10%", "static")
    for cache, policy in (*policies, *([("some", "and none")] if groups > 1 else [])):
        yield Mode(True, DEPTHS[1], threads, cache, policy)
    if threads > 1:
        yield Mode(True, DEPTHS[1], 1, "10%")
    yield Mode(False, 0, threads)
    yield Mode(False, DEPTHS[1], threads)


def caches(mode: Mode, model: Model, batches: Sequence[Batch]) -> dict[str, CacheSpec] | None:
    """Return a mode's caches by the first table of each group, or None for a mode without caches."""
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
    settings: TrainConfig,
    mode: Mode,
    batches: Sequence[Batch],
    schema: Schema,
    faulty_group: int | None,
    micro_batches: int = 1,
    world: World = ALONE_WORLD,
    layout: Layout | None = None,
) -> Record:
    """Train on batches and record every step.

    With several ranks, `batches` are this rank's parts of the batches, and only the rows of this rank are recorded.

    Args:
        faulty_group: Number of the group whose reads do not wait for updates by earlier batches (the injected fault),
            or None for no fault.
        layout: How the network is distributed over the ranks, or None if each rank has the whole network.
    """
    set_host_threads(mode.threads)
    record = Record([{} for _ in batches], [], "")
    local_ids: list[Any] = []  # by group, the ids of this rank's rows, or the keys of rows; None if rows are ids
    names: list[list[Any]] = []  # (table, state names) by group; `after_update` must not keep the trainer alive
    seed_torch(settings.seed)
    model = make_model(settings, schema)
    if not mode.on_disk:
        model.tables = {name: replace(spec, disk=None) for name, spec in model.tables.items()}

    def after_update(number: int, group: int, ids: Any, places: list[tuple[Any, Any]]) -> None:
        if local_ids[group] is not None:
            ids = local_ids[group][ids]
        for (name, states), (block, at) in zip(names[group], places, strict=True):
            _add_rows(record.steps[number - 1], name, states, ids, block, at)

    def delay(stage: str, number: int) -> None:
        if stage == "update":
            time.sleep(_FAULT_SECONDS)

    hooks = PipelineHooks(after_update=after_update)
    if faulty_group is not None:
        hooks = PipelineHooks(after_update=after_update, ignore_hazards=[faulty_group], before_stage=delay)
    parts = None
    if layout is not None:
        parts = partial(registry.find("network", "parts"), layout=layout, sample=batches[0])
    trainer = Trainer(
        model,
        host_device_mix=mode.host_device_mix,
        device=backend.select(settings.device),
        steps=StepSettings.of(settings)._replace(micro_batches=micro_batches),
        schema=schema,
        make_network=parts,
        cache=caches(mode, model, batches),
        depth=mode.depth,
        world=world,
        hooks=hooks,
    )
    for group in trainer.runtime.group_specs:
        names.append([(table.name, ["weights", *table.slots]) for table in group.tables])
        table: Any = group.tables[0]
        if table.capabilities.by_key:
            local_ids.append(table.key_rows.index.keys)
        else:
            local_ids.append(table.ids(0, table.rows) if world.size > 1 else None)
    with bar(len(batches), str(mode), "step") as progress:
        for number, result in enumerate(trainer.train(batches)):
            record.losses.append(tuple(result.value))
            record.steps[number] |= _hash_dense(trainer.dense_state())
            progress.update()
    dense = trainer.dense_state()
    weights = {name: dense.model[name].detach().cpu().float().numpy().copy() for name in dense.names}
    digest = trainer.state_sha256()
    trainer.close()
    return record._replace(digest=digest, weights=weights)


def _count(model: Model, batches: Sequence[Batch], table: str) -> npt.NDArray[np.int64]:
    """Count how often the batches use each row of a table."""
    counts = np.zeros(model.tables[table].rows, np.int64)
    for batch in batches:
        counts += np.bincount(ids_of(model, batch, table), minlength=len(counts))
    return counts


def _add_rows(step: Step, table: str, states: Sequence[str], ids: Any, block: Any, at: Any) -> None:
    """Add hashes of a table's rows `ids` to a step's record; the rows are block[at], in the table or in a cache."""
    if isinstance(block, torch.Tensor):
        block = block.index_select(0, at.to(block.device)).cpu().numpy()
        at = identity(len(block))
    if isinstance(ids, torch.Tensor):
        ids = ids.cpu().numpy()
    hashes = hash_rows(block, at)
    for i, name in enumerate(states[: hashes.shape[1]]):  # scalar state per row is left out here; the digest covers it
        key = f"{table}/{name}"
        before = step.get(key, (ids[:0], hashes[:0, i]))
        step[key] = (np.concatenate([before[0], ids]), np.concatenate([before[1], hashes[:, i]]))


def _hash_dense(dense: DenseState) -> Step:
    """Return hashes of the rows of all dense tensors; empty if the dense state is on another rank."""
    tensors: Step = {}
    for name, value, _ in dense_arrays(dense):
        rows = value.float().cpu().numpy().reshape(value.shape[0] if value.ndim else 1, 1, -1)
        ids = identity(len(rows))
        tensors[f"dense/{name}"] = (ids, hash_rows(np.ascontiguousarray(rows), ids)[:, 0])
    return tensors


def compare(reference: Record, other: Record) -> Difference | None:
    """Return the first step, tensor and row in which another run differs, or None if the runs are equal."""
    for step, (ours, theirs) in enumerate(zip(reference.steps, other.steps, strict=True), 1):
        for tensor in sorted(ours | theirs, key=is_dense):  # tables before dense layers: a fault begins in rows
            if tensor not in ours or tensor not in theirs:
                return Difference(step, tensor, None)
            (ids, hashes), (their_ids, their_hashes) = _sort_rows(ours[tensor]), _sort_rows(theirs[tensor])
            wrong = np.flatnonzero(hashes != their_hashes) if np.array_equal(ids, their_ids) else identity(1)
            if len(wrong):
                return Difference(step, tensor, int(ids[wrong[0]]) if len(ids) else None)
        if reference.losses[step - 1] != other.losses[step - 1]:
            return Difference(step, "losses", None)
    if reference.digest != other.digest:
        return Difference(len(reference.steps), "a row that no batch uses", None)
    return None


def is_dense(tensor: str) -> bool:
    """Return whether a recorded tensor is one of the dense layers."""
    return tensor.startswith("dense/")


def _sort_rows(rows: tuple[npt.NDArray[Any], Hashes]) -> tuple[npt.NDArray[Any], Hashes]:
    order = np.argsort(rows[0], kind="stable")
    return rows[0][order], rows[1][order]


def get_batch_size(settings: TrainConfig, reader: ShardReader, steps: int) -> int:
    """Return the number of samples in a step."""
    reader.require(settings.batch_size or 1)
    return settings.batch_size or min(REFERENCE_BATCH_SIZE, -(-reader.rows // steps))


def read_batches(reader: ShardReader, size: int, seed: int, steps: int, part: tuple[int, int] = (0, 1)) -> list[Batch]:
    """Read the batches of the first `steps` steps, or one part of each batch: `part` is (index, number of parts)."""
    epochs = (reader.batches(size, seed=seed, epoch=epoch, part=part) for epoch in itertools.count(1))
    return list(itertools.islice(itertools.chain.from_iterable(epochs), steps))
