"""Compares training in several processes, whose records are merged, with training in one process."""

if __name__ == "__main__":
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.verify.process_cli", "hostdev.verify"))

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.preprocess import lookalike
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.distributed.mesh import Layout, Mesh
from hostdev.distributed.session import join
from hostdev.distributed.start import start_processes, wait_for
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.ext.verify.modes import Mode, Record, compare, get_batch_size, read_batches, train
from hostdev.train.build import device_of
from hostdev.train.options import TrainConfig

_MODULE = "hostdev.ext.verify.processes"  # run by the processes
_WAYS = ((0, None), (2, None), (2, "10%"))  # depth, cache
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
        return _merge([Path(folder) / f"{rank}.npz" for rank in range(mesh.size)], steps)


def _merge(files: Sequence[Path], steps: int) -> Record:
    """Merge the records of the ranks."""
    record = Record([{} for _ in range(steps)], [], "")
    for rank, file in enumerate(files):
        with np.load(file) as held:
            if rank == 0:
                record = record._replace(
                    digest=str(held["digest"]),
                    losses=[tuple(each) for each in held["losses"].tolist()],
                    weights={key.partition("|")[2]: held[key] for key in held.files if key.startswith("weights|")},
                )
            for key in held.files:
                what, _, rest = key.partition("|")
                if what != "ids":
                    continue
                number, _, tensor = rest.partition("|")
                if tensor.startswith("dense/") and rank:
                    continue
                step = record.steps[int(number)]
                ids, hashes = held[key], held[f"hashes|{rest}"]
                if tensor in step:
                    ids, hashes = np.concatenate([step[tensor][0], ids]), np.concatenate([step[tensor][1], hashes])
                step[tensor] = ids, hashes
    return record


def run_rank(
    settings: TrainConfig, steps: int, micro_batches: int, mode: Mode, mesh: str, layout: str, folder: Path
) -> None:
    """Train as one of several processes and write the record to `folder`/RANK.npz; `layout` is JSON."""
    with join(mesh) as ranks:
        world = ranks or ALONE_WORLD
        how = Layout(*json.loads(layout)) if world.has_parts else None
        record = _record(settings, world, steps, micro_batches, mode, how)
    values: dict[str, Any] = {"digest": record.digest, "losses": np.array(record.losses)}
    for number, step in enumerate(record.steps):
        for tensor, (ids, hashes) in step.items():
            values[f"ids|{number}|{tensor}"], values[f"hashes|{number}|{tensor}"] = ids, hashes
    values |= {f"weights|{name}": value for name, value in record.weights.items()}
    np.savez(folder / f"{world.rank}.npz", **values)


def _record(
    settings: TrainConfig, world: World, steps: int, micro_batches: int, mode: Mode, layout: Layout | None
) -> Record:
    torch.set_num_threads(1)
    data = settings.data or lookalike.ensure()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
    device_of(settings.device, tf32=settings.tf32)
    batches = read_batches(reader, get_batch_size(settings, reader, steps), settings.seed, steps, world.share())
    return train(settings, mode, batches, found.schema, None, micro_batches, world, layout)
