"""Claim: a checkpoint is written at 70% of the disk's speed or more, and training stops for at most 10% of that time.

A loop trains a table with Zipf ids; its dense step only waits, as for an accelerator. The same run writes blocks of 64
MiB to the same disk, each with an fsync, and reads them again after dropping the page cache. A full checkpoint and,
some steps later, an incremental one are saved while the loop continues. Then the benchmark measures a load, and the
latency of a `Predictor` relative to its dense network alone: with a vocabulary, and with as many hashed ids as rows.

Training stops during the call of `save`, and while rows that it is about to write are copied first. The benchmark also
reports how much longer the steps take during the write than before: on few cores the threads that hash and write take
time from the host's kernels.
"""

import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

import hostdev
from bench.record import make_parser, record
from bench.workload import draw_ids
from hostdev.checkpoint import folder
from hostdev.checkpoint.loading import load_tables, verify
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.preprocess import synthetic
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.device import backend
from hostdev.train.build import model_of
from hostdev.train.checkpointing import Progress, data_files, values
from hostdev.train.options import TrainConfig
from hostdev.train.quality import Quality
from hostdev.train.trainer import StepSettings, Trainer

DIM, UNIQUE_IDS = 80, 200_000
BLOCK = 1 << 26
STEP_SECONDS = 0.05  # duration of the dense side, which only waits
LIMITS = {"write rate": 0.7, "stall": 0.1, "latency of a batch of 1": 2.0}


def drop_page_cache(paths: list[Path]) -> None:
    """Drop files from the page cache, so that the next read is from the disk."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def disk_rates(path: Path, size: int) -> tuple[float, float]:
    """Return the GB/s of writing and of reading blocks; each block is a file, written with an fsync."""
    block = np.random.default_rng(0).integers(0, 255, BLOCK, np.uint8).tobytes()
    files = [path / f"block-{i}" for i in range(max(1, size // BLOCK))]
    start = time.perf_counter()
    for file in files:
        with file.open("wb", buffering=0) as out:
            out.write(block)
            os.fsync(out.fileno())
    written = time.perf_counter() - start
    drop_page_cache(files)
    start = time.perf_counter()
    for file in files:
        file.read_bytes()
    read = time.perf_counter() - start
    for file in files:
        file.unlink()
    return len(files) * BLOCK / written / 1e9, len(files) * BLOCK / read / 1e9


def run_steps(runtime: hostdev.Runtime, rows: int) -> Iterator[None]:
    """Yield after each step; the dense side only waits, and gradients are ones."""
    batches = [torch.from_numpy(draw_ids(rows, UNIQUE_IDS, seed)) for seed in range(8)]
    one = torch.ones(1)
    for _, found in runtime.train(itertools.cycle(batches), ids=lambda ids: {"t": ids}, read_ahead=True):
        time.sleep(STEP_SECONDS)
        found["t"].backward(one.expand_as(found["t"]))
        yield


def timed(steps: Iterator[None], until: Callable[[int], bool]) -> list[float]:
    """Return the seconds of each step; `until` gets the number of steps and returns whether to stop."""
    times: list[float] = []
    while not until(len(times)):
        start = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - start)
    return times


def saving(path: Path, rows: int, settle: int, between: int) -> dict[str, float]:
    """Measure a full checkpoint and an incremental one during training, and a load."""
    table = hostdev.HostTable(rows, DIM, hostdev.LazyAdam(), name="t")
    runtime = hostdev.Runtime({"t": table}, device="cpu", depth=2)
    steps = run_steps(runtime, rows)
    timed(steps, lambda n: n == settle)
    plain = statistics.median(timed(steps, lambda n: n == settle))
    found: dict[str, float] = {"step ms": plain * 1e3}
    copying = 0.0
    for what in ("whole", "adding"):
        disk, _ = disk_rates(path, 1 << 31)
        start = time.perf_counter()
        made = runtime.save(path / "c", wait=False)
        called = time.perf_counter() - start
        times = timed(steps, lambda _: not made.is_running)  # noqa: B023
        seconds = time.perf_counter() - start
        checkpoint = made.wait()
        manager = next(iter(runtime._checkpoints._managers.values()))
        copying, before = manager.copying_seconds, copying
        size = checkpoint.manifest.nbytes
        longer = sum(max(0.0, one - plain) for one in times)
        written = sum(file.rows for file in checkpoint.manifest.tables[0].files)
        found |= {
            f"{what}: GB": size / 1e9,
            f"{what}: rows": written,
            f"{what}: seconds": seconds,
            f"{what}: GB/s": size / seconds / 1e9,
            f"{what}: of the disk's": size / seconds / 1e9 / disk,
            f"{what}: disk GB/s": disk,
            f"{what}: save() ms": called * 1e3,
            f"{what}: stall of the write": (called + copying - before) / seconds,
            f"{what}: longer steps of the write": longer / seconds,
            f"{what}: p99 of a step over the median": sorted(times)[int(0.99 * len(times))] / plain,
            f"{what}: copied aside MB": manager.most_copied / 1e6,
            f"{what}: bytes over those of the rows": size / (written * table.storage.block[0].nbytes),
        }
        timed(steps, lambda n: n == between)
    steps.close()  # type: ignore[attr-defined]
    chain = folder.read_chain(checkpoint.path)
    files = [each.path / file.file for each in chain for file in each.manifest.files]
    size = sum(file.stat().st_size for file in files)
    drop_page_cache(files)
    _, disk = disk_rates(path, 1 << 31)
    start = time.perf_counter()
    verify(chain)
    load_tables(chain, {"t": table})
    seconds = time.perf_counter() - start
    return found | {"load: GB/s, checked": size / seconds / 1e9, "load: of the disk's": size / seconds / 1e9 / disk}


def predicting(path: Path, data: Path, rounds: int) -> dict[str, float]:
    """Measure the latency of Wide & Deep's predictions from ids, and from one row as a dict."""
    found = manifest.read(data)
    rows = found.schema.rows
    settings = TrainConfig(data=data, emb_dim=DIM).resolved()
    model = model_of(settings, found.schema)
    device = backend.select("cpu")
    trainer = Trainer(model, host_device_mix=True, device=device, steps=StepSettings(1))
    with hostdev.checkpoint.manager.CheckpointManager(path / "p") as to:
        to.lock()
        more = values(settings, found, "cpu", Progress(), Quality())
        trainer.save(to, 1, more, data_files(data, found)).wait()
    del trainer
    start = time.perf_counter()
    predictor = hostdev.Predictor(path / "p")
    result = {"start ms": (time.perf_counter() - start) * 1e3}
    rng = np.random.default_rng(0)
    schema = predictor.data.schema

    def measure(run: Callable[[], object], count: int) -> tuple[float, float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times), sorted(times)[int(0.99 * len(times))]

    for size in (1, 64, 4096):
        ids = rng.integers(0, rows, (size, len(schema.ids))).astype(np.int32)
        batch = Batch(np.zeros(size, np.float32), rng.random((size, len(schema.dense)), np.float32), ids, {})
        with torch.inference_mode():
            looked_up, dense = predictor.rows(batch), torch.from_numpy(batch.dense)

        def network(dense: torch.Tensor = dense, looked_up: dict = looked_up) -> object:
            with torch.inference_mode():
                return predictor.model(dense, looked_up)

        ways = {"ids": lambda batch=batch: predictor.logits(batch), "network": network}
        if size == 1:
            row = dict.fromkeys(schema.dense, 1.0) | dict.fromkeys(schema.ids, "05db9164")
            ways["dict"] = partial(predictor, row)
        for run in ways.values():
            measure(run, 20)
        measured = {name: measure(run, rounds if size < 4096 else max(10, rounds // 20)) for name, run in ways.items()}
        for name, (median, tail) in measured.items():
            result |= {f"{size}, {name}: ms": median, f"{size}, {name}: p99 ms": tail}
            if name != "network":
                result[f"{size}, {name}: over the network"] = median / measured["network"][0]
    return result


def _report(what: str, value: float, limit: float, *, least: bool = False) -> None:
    met = value >= limit if least else value <= limit
    print(f"{what}: {value:.2f}, at {'least' if least else 'most'} {limit}: {'met' if met else 'not met'}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the table (D = 80)")
    parser.add_argument("--steps", type=int, default=30, help="steps before the first checkpoint and after each")
    parser.add_argument("--rounds", type=int, default=500, help="number of predictions")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    arguments = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=arguments.dir))
    try:
        result = {"saving": saving(path, arguments.rows, arguments.steps, arguments.steps)}
        shutil.rmtree(path / "c")
        result["predicting"] = predicting(path / "v", synthetic.ensure_lookalike()[0], arguments.rounds)
        hashed = Options(threshold=None, hash_buckets=arguments.rows, dense="log")
        build(Synthetic(10_000, 0), path / "hashed", hashed)
        result["predicting, hashed ids"] = predicting(path / "h", path / "hashed", arguments.rounds)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    for part, figures in result.items():
        print(f"\n{part}")
        for name, value in figures.items():
            print(f"  {name:<34}{value:>14,.3f}")
    saved = result["saving"]
    for what in ("whole", "adding"):
        _report(f"{what}: of the disk's rate", saved[f"{what}: of the disk's"], LIMITS["write rate"], least=True)
        _report(f"{what}: stall of the write", saved[f"{what}: stall of the write"], LIMITS["stall"])
    for part, way in itertools.product(list(result)[1:], ("ids", "dict")):
        over = result[part][f"1, {way}: over the network"]
        _report(f"{part}, a batch of 1, {way}: over the network", over, LIMITS["latency of a batch of 1"])
    record("checkpoint", result, arguments.out)
