"""Several processes against one: each trains its part and records it, and the records together are compared."""

if __name__ == "__main__":
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.verify_processes"))

import os
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
from hostdev.data import lookalike, manifest
from hostdev.data.batch import Batch
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.device.backend import take_turns
from hostdev.parallel.place import find
from hostdev.parallel.ranks import Ranks
from hostdev.parallel.start import start_here, wait_for
from hostdev.train import config
from hostdev.train.build import device_of
from hostdev.train.config import TrainConfig, to_flags
from hostdev.verify import OPTIONS, Mode, Record, batches_of, compare, size_of, train

PROG = "hostdev.verify_processes"
_WAYS = ((0, None), (2, None), (2, "10%"))  # depth, cache


def compare_worlds(
    settings: TrainConfig, reference: Mode, batches: Sequence[Batch], schema: Schema, worlds: Sequence[int],
    micro_batches: int, report: Callable[[str], None],
) -> int:  # fmt: skip
    """Train with each number of processes, report how each compares with one, and return how many differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as several processes do: some bits of a sum depend on it
    try:
        expected = train(settings, reference, batches, schema, None, micro_batches)
    finally:
        torch.set_num_threads(threads)
    report(f"\n{micro_batches} micro-batches\n{reference!s}{expected.digest[:16]}  the reference")
    different = 0
    for world in worlds:
        for depth, cache in _WAYS:
            record = _of_processes(settings, world, Mode(True, depth, 1, cache), len(batches), micro_batches)
            difference = compare(expected, record)
            different += difference is not None
            what = f"depth {depth}" + (f", cache {cache}" if cache else "")
            report(f"{f'{world} processes':<14}{what:<47}{record.digest[:16]}  {difference or 'equal'}")
    return different


def _of_processes(settings: TrainConfig, world: int, mode: Mode, steps: int, micro_batches: int) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        more = [str(steps), str(micro_batches), str(mode.depth), mode.cache or "", folder]
        output = Path(folder) / "output.log"
        with output.open("wb") as log:
            command = [sys.executable, "-m", PROG, *more, *to_flags(settings)]
            code = wait_for(start_here(world, command, stdout=log, stderr=subprocess.STDOUT))
        if code:
            lines = output.read_text().strip().splitlines()
            raise UserError(f"{world} processes have failed: {lines[-1] if lines else f'exit code {code}'}")
        return _joined([Path(folder) / f"{rank}.npz" for rank in range(world)], steps)


def _joined(files: Sequence[Path], steps: int) -> Record:
    """Return what the ranks have recorded as one."""
    record = Record([{} for _ in range(steps)], [], "")
    for rank, file in enumerate(files):
        with np.load(file) as held:
            if rank == 0:
                record = record._replace(
                    digest=str(held["digest"]), losses=[tuple(each) for each in held["losses"].tolist()]
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


def main(argv: Sequence[str]) -> int:
    """Be one of several processes, and write down what it has trained."""
    steps, micro_batches, depth, cache, folder = argv[:5]
    parser = cli.parser(PROG, "One of the processes that hostdev.verify starts.")
    config.add_flags(parser, OPTIONS)
    settings = config.from_flags(parser.parse_args(argv[5:]), OPTIONS)
    place = find()

    def fault(rank: int, why: str) -> None:
        os.write(2, f"rank {rank} of {place.ranks}: {why}\n".encode())
        os._exit(2)

    take_turns(place.local_rank)
    ranks = Ranks(place, fault)
    try:
        record = _record(settings, ranks, int(steps), int(micro_batches), Mode(True, int(depth), 1, cache or None))
    except Exception as error:
        ranks.watch.fail(str(error))
        raise
    values: dict[str, Any] = {"digest": record.digest, "losses": np.array(record.losses)}
    for number, step in enumerate(record.steps):
        for tensor, (ids, hashes) in step.items():
            values[f"ids|{number}|{tensor}"], values[f"hashes|{number}|{tensor}"] = ids, hashes
    np.savez(Path(folder) / f"{place.rank}.npz", **values)
    ranks.leave()
    return 0


def _record(settings: TrainConfig, ranks: Ranks, steps: int, micro_batches: int, mode: Mode) -> Record:
    torch.set_num_threads(1)
    data = settings.data or lookalike.ensure()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train")
    device_of(settings.device, tf32=settings.tf32)
    batches = batches_of(reader, size_of(settings, reader, steps), settings.seed, steps, ranks.part())
    return train(settings, mode, batches, found.schema, None, micro_batches, ranks)
