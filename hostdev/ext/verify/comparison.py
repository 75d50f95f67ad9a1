"""python -m hostdev.verify: train a few steps in every mode on the user's data, and compare each step bit by bit.

Training in several processes, whose records are merged, is compared with training in one process.
"""

import gc
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hostdev.cache.cache import CacheTooLargeError
from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.preprocess import synthetic
from hostdev.data.preprocess.options import ids_in_words
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.distributed.rank_environment import start_processes, wait_for
from hostdev.distributed.session import join
from hostdev.distributed.world import ALONE_WORLD, Layout, Mesh, World
from hostdev.ext.parallel.plan import resolve_layout, sliceable
from hostdev.ext.training.starting import make_model
from hostdev.ext.verify.modes import Mode, Record, compare, get_batch_size, is_dense, modes, read_batches, train
from hostdev.kernels.pool import host_threads
from hostdev.models.model import Model
from hostdev.train.build import device_of, groups_of, ids_of, vector_tables
from hostdev.train.network import inputs_like
from hostdev.train.options import TrainConfig

_MODULE = "hostdev.ext.verify.process_cli"  # the module that each process runs
_WAYS = ((0, None), (2, None), (2, "10%"))  # pipeline depth and cache of the runs to compare with one process
_TOLERANCE = 1e-5  # relative tolerance for losses if layers are sliced, because their sums have a different order
_WEIGHTS = 1e-4  # tolerance for the final dense weights, relative to their norm


def compare_meshes(
    settings: TrainConfig,
    reference: Mode,
    batches: Sequence[Batch],
    schema: Schema,
    meshes: Sequence[tuple[Mesh, Layout]],
    micro_batches: int,
    report: Callable[[str], None],
) -> int:
    """Train with each mesh, report the comparisons with one process, and return the number of runs that differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes: the last bits of a sum depend on this number
    try:
        expected = train(settings, reference, batches, schema, None, micro_batches)
    finally:
        torch.set_num_threads(threads)
    report(f"\n{micro_batches} micro-batches\n{reference!s}{expected.digest[:16]}  the reference")
    different = 0
    for mesh, layout in meshes:
        for depth, cache in _WAYS:
            record = _train_processes(settings, mesh, layout, Mode(True, depth, 1, cache), len(batches), micro_batches)
            if mesh.model == 1:
                found = compare(expected, record)
                wrong, says = found is not None, str(found or "equal")
            else:
                wrong, says = _compare_by_tolerance(expected, record)
            different += wrong
            what = f"depth {depth}" + (f", cache {cache}" if cache else "")
            who = f"{mesh.size} processes" if mesh.data == mesh.size else str(mesh)
            report(f"{who:<24}{what:<37}{record.digest[:16]}  {says}")
    return different


def _compare_by_tolerance(expected: Record, record: Record) -> tuple[bool, str]:
    """Return whether a run with sliced layers differs by more than the tolerance, and the differences as text."""
    losses, theirs = np.array(expected.losses), np.array(record.losses)
    far = float(np.max(np.abs(losses - theirs) / np.abs(losses)))
    apart = sum(float(np.sum((value - record.weights[name]) ** 2.0)) for name, value in expected.weights.items())
    size = sum(float(np.sum(value**2.0)) for value in expected.weights.values())
    weights = (apart / size) ** 0.5
    wrong = not (far <= _TOLERANCE and weights <= _WEIGHTS)
    how = "DIFFERENT" if wrong else "within tolerance"
    return wrong, (
        f"{how}: losses differ by {far:.1e} (limit {_TOLERANCE:g}), weights by {weights:.1e} (limit {_WEIGHTS:g})"
    )


def _train_processes(
    settings: TrainConfig, mesh: Mesh, layout: Layout, mode: Mode, steps: int, micro_batches: int
) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        more = [*map(str, (steps, micro_batches, mode.depth)), mode.cache or "", folder, str(mesh), json.dumps(layout)]
        output = Path(folder) / "output.log"
        with output.open("wb") as log:
            command = [sys.executable, "-m", _MODULE, *more, *settings.to_flags()]
            code = wait_for(start_processes(mesh.size, command, stdout=log, stderr=subprocess.STDOUT))
        if code:
            lines = output.read_text(errors="replace").strip().splitlines()
            raise UserError(f"{mesh.size} processes failed: {lines[-1] if lines else f'exit code {code}'}")
        return _merge([Path(folder) / f"{rank}.pickle" for rank in range(mesh.size)])


def _merge(files: Sequence[Path]) -> Record:
    """Merge the records of the ranks. Dense tensors, losses and weights are those of rank 0."""
    merged: Record
    merged, *others = (pickle.loads(file.read_bytes()) for file in files)
    for record in others:
        for step, more in zip(merged.steps, record.steps, strict=True):
            for tensor, rows in more.items():
                if tensor in step and not is_dense(tensor):
                    ids, hashes = (np.concatenate(parts) for parts in zip(step[tensor], rows, strict=True))
                    step[tensor] = ids, hashes
                elif not is_dense(tensor):
                    step[tensor] = rows
    return merged


def run_rank(
    settings: TrainConfig, steps: int, micro_batches: int, mode: Mode, mesh: str, layout: str, folder: Path
) -> None:
    """Train as one of several processes and write the record to `folder`/RANK.pickle; `layout` is JSON."""
    with join(mesh) as ranks:
        world = ranks or ALONE_WORLD
        how = Layout(*json.loads(layout)) if world.has_parts else None
        record = _record(settings, world, steps, micro_batches, mode, how)
    (folder / f"{world.rank}.pickle").write_bytes(pickle.dumps(record))


def _record(
    settings: TrainConfig, world: World, steps: int, micro_batches: int, mode: Mode, layout: Layout | None
) -> Record:
    torch.set_num_threads(1)
    data = settings.data or synthetic.ensure_lookalike()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
    device_of(settings.device, tf32=settings.tf32)
    batches = read_batches(reader, get_batch_size(settings, reader, steps), settings.seed, steps, world.share())
    return train(settings, mode, batches, found.schema, None, micro_batches, world, layout)


def verify(
    settings: TrainConfig,
    steps: int,
    *,
    fault: bool,
    report: Callable[[str], None] = print,
    meshes: Sequence[Mesh] = (),
    layout: Layout | None = None,
    micro_batches: int = 1,
) -> list[int]:
    """Train in every mode, and compare each run with the reference, a serial run.

    Args:
        fault: Whether to inject a fault into each group in turn: batches read rows before earlier batches update them.
        meshes: Meshes of processes to compare with one process.
        layout: How the network is distributed over meshes that have stages or slices.
        micro_batches: Number of micro-batches per batch, which the processes of a mesh share.

    Returns:
        A list with the number of modes that differ; with `fault`, one number for each group.
    """
    data = settings.data or synthetic.ensure_lookalike()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
    size = get_batch_size(settings, reader, steps)
    device = device_of(settings.device, tf32=settings.tf32)
    batches = read_batches(reader, size, settings.seed, steps)
    if settings.tables == "dynamic" and settings.capacity is None:
        settings = replace(settings, capacity=str(_count_ids(settings, found.schema, batches)))
    model = make_model(settings, found.schema)
    placed = [(mesh, adapt_layout(mesh, layout or Layout(), model, batches[0])) for mesh in meshes]
    groups, dims = groups_of(model), sorted({spec.dim for spec in vector_tables(model).values()})
    report(f"data     {shown_place(data)}: {steps} steps of {size:,} samples, {ids_in_words(found.schema.rows)}")
    report(f"model    {settings.model}: " + "; ".join(" and ".join(tables) for tables in groups))
    report(
        f"dense    {settings.arithmetic} on {backend.describe(device)}; D = {', '.join(map(str, dims))}, "
        f"l2 {settings.l2}\n"
    )
    if settings.l2 == "table":
        report("--l2 table cannot be used with a cache: modes with a cache are skipped\n")
    report(f"{'tables':<14}{'pipeline':<10}{'':<37}state_sha256")
    by_key = settings.tables == "dynamic"
    ways = list(modes(settings.host_threads or host_threads(), len(groups), by_key=by_key))
    reference, *others = [mode for mode in ways if mode.cache is None or settings.l2 != "table"]
    if settings.table_dir is not None:
        others = [mode._replace(on_disk=mode.host_device_mix) for mode in (reference, *others)]
    expected = train(settings, reference, batches, found.schema, None)
    report(f"{reference!s}{expected.digest[:16]}  the reference")
    with _older_objects_kept():
        if not fault:
            different = [_compare_all(settings, others, batches, found.schema, None, expected, report)]
            if meshes:
                how = (batches, found.schema, placed, micro_batches, report)
                different[0] += compare_meshes(settings, reference, *how)
            return different
        overlapped = [mode for mode in others if mode.host_device_mix and mode.depth]
        different = []
        for number, tables in enumerate(groups):
            if len(groups) > 1:
                report(f"a fault in {' and '.join(tables)}")
            different.append(_compare_all(settings, overlapped, batches, found.schema, number, expected, report))
        return different


@contextmanager
def _older_objects_kept() -> Iterator[None]:
    """Exempt existing objects from garbage collection: visiting all objects of torch takes a second each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def adapt_layout(mesh: Mesh, layout: Layout, model: Model, sample: Batch) -> Layout:
    """Return the parts of a layout that a mesh uses. If a mesh with slices has no plan, slice the layers in pairs.

    Raises:
        UserError: The model does not allow this layout.
    """
    inputs = partial(inputs_like, model, sample, None)
    plan = layout.plan
    if mesh.model > 1 and not plan:
        units = sliceable(model, mesh.model, lambda: inputs(2))
        plan = [layer for unit in units if len(unit) == 2 for layer in unit]
    mine = Layout(layout.schedule, layout.begins if mesh.pipe > 1 else None, plan if mesh.model > 1 else ())
    if mesh.size > mesh.data:
        resolve_layout(model, mine, mesh, inputs)
    return mine


def _compare_all(
    settings: TrainConfig,
    ways: Sequence[Mode],
    batches: Sequence[Batch],
    schema: Schema,
    faulty_group: int | None,
    expected: Record,
    report: Callable[[str], None],
) -> int:
    """Train in each mode of `ways`, report the comparisons, and return the number of modes that differ."""
    different = 0
    for mode in ways:
        gc.collect()  # torch's first steps leave frames that keep the last mode's tables alive
        try:
            record = train(settings, mode, batches, schema, faulty_group)
        except CacheTooLargeError as error:
            report(f"{mode!s}not run: {error}")
            continue
        difference = compare(expected, record)
        different += difference is not None
        report(f"{mode!s}{record.digest[:16]}  {difference or 'equal'}")
    return different


def _count_ids(settings: TrainConfig, schema: Schema, batches: Sequence[Batch]) -> int:
    """Return the number of distinct ids of the batches in the group of tables that has the most."""
    model = make_model(settings, schema)
    return max(
        len(np.unique(np.concatenate([ids_of(model, batch, tables[0]) for batch in batches])))
        for tables in groups_of(model)
    )
