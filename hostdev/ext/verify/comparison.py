"""python -m hostdev.verify: train a few steps in every mode on the user's data, and compare each step bit by bit."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from hostdev.cache.cache import CacheTooLargeError
from hostdev.core.addresses import shown_place
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.preprocess import lookalike
from hostdev.data.preprocess.options import ids_in_words
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.distributed.mesh import STRATEGIES, Layout, Mesh
from hostdev.ext.parallel.layout import resolve_layout
from hostdev.ext.parallel.plan import divides, pairable
from hostdev.ext.training.initial_vectors import make_model
from hostdev.ext.verify.modes import Mode, Record, compare, get_batch_size, modes, read_batches, train
from hostdev.ext.verify.processes import compare_meshes
from hostdev.kernels.pool import host_threads
from hostdev.models.model import Model
from hostdev.train.build import device_of, groups_of, ids_of, vector_tables
from hostdev.train.network import inputs_like
from hostdev.train.options import TrainConfig


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
    data = settings.data or lookalike.ensure()[0]
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
        modules, taken = dict(model.named_modules()), set[str]()
        for pair in sorted(pairable(model, lambda: inputs(2))):
            able = all(divides(modules[name], how, mesh.model) for name, how in zip(pair, STRATEGIES, strict=False))
            if able and not taken.intersection(pair):
                taken.update(pair)
                plan = [*plan, *zip(pair, STRATEGIES, strict=False)]
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
