"""Claim: with the pipeline a step costs at most 1.1 x max(host, device), and at depth 0 the pipeline itself under 3%.

The accelerator is simulated: a dense step that only waits a set time, so that the host is as free as it would be. Its
time is 0.5, 1 and 2 times the host's, which is measured serially in the same round. With a real one, whole training
steps as well. Runs are in turn, round after round; medians, of the ratios too.
"""

import argparse
import itertools
import statistics
import time
from types import SimpleNamespace

import hostdev.environment  # isort: skip  (before torch)
import numba
import numpy as np
import torch
from record import record
from workload import DIM, ids_of

import hostdev
from hostdev.batch import Batch
from hostdev.device import backend
from hostdev.device.staging import Staging
from hostdev.embedding import Embedding
from hostdev.host.server import ParameterServer
from hostdev.kernels.pool import host_threads
from hostdev.optimizers import FTRL, LazyAdam
from hostdev.pipeline import Pipeline
from hostdev.primitive import OpLog
from hostdev.timeline import Timeline
from hostdev.trainer import Trainer

FIELDS = 39
FACTORS = (0.5, 1.0, 2.0)


class Simulated:
    """A model whose step waits `seconds` and whose gradients are there already."""

    reads_whole_tables = False

    def __init__(self, unique: int) -> None:
        self.seconds = 0.0
        self._grads = [torch.full((unique, columns), 1e-3) for columns in (1, DIM)]

    def prepare(self, batch: Batch) -> SimpleNamespace:
        ids, inverse = hostdev.unique(batch.ids.ravel())
        return SimpleNamespace(ids=ids, inverse=inverse)

    def await_prepared(self, prepared: SimpleNamespace) -> None:
        pass

    def step(self, prepared: SimpleNamespace, rows: list[torch.Tensor]) -> tuple[None, list[torch.Tensor]]:
        if self.seconds:
            time.sleep(self.seconds)
        return None, [grads[: len(prepared.ids)] for grads in self._grads]


def batches_of(kind: str, rows: int, size: int, count: int) -> list[Batch]:
    """Return batches with uniform or Zipf ids."""
    rng = np.random.default_rng(0)
    drawn = ids_of(rows, size * FIELDS * 4)
    zeros = np.zeros((size, FIELDS), np.float32)
    made = []
    for _ in range(count):
        ids = rng.integers(0, rows, size * FIELDS) if kind == "uniform" else rng.choice(drawn, size * FIELDS)
        made.append(Batch(zeros[:, 0], ids.astype(np.int32).reshape(size, FIELDS), zeros))
    return made


def tables_of(rows: int) -> list[Embedding]:
    """Return the wide and the deep table."""
    cpu = torch.device("cpu")
    place = {"target": "CPU", "device": cpu, "seed": 1, "log": OpLog(), "server": ParameterServer()}
    return [Embedding("wide", rows, 1, FTRL(), **place), Embedding("deep", rows, DIM, LazyAdam(), **place)]


def plain_loop(tables: list[Embedding], model: Simulated, batches: list[Batch]) -> None:
    """The same work without a pipeline."""
    for batch in batches:
        prepared = model.prepare(batch)
        rows = [torch.empty((len(prepared.ids), part.table.dim)) for part in tables]
        for part, out in zip(tables, rows, strict=True):
            part.lookup(part.table, prepared.ids, out.numpy(), None)
        _, grads = model.step(prepared, rows)
        for part, grad in zip(tables, grads, strict=True):
            part.update(part.table, prepared.ids, grad.numpy())


def per_step(pipeline: Pipeline, batches: list[Batch]) -> float:
    """Return the seconds of a step."""
    start = time.perf_counter()
    for _ in pipeline.train(batches):
        pass
    return (time.perf_counter() - start) / len(batches)


def simulated(kind: str, rows: int, size: int, depths: list[int], steps: int, rounds: int) -> list[dict]:
    """Measure one kind of ids; print and return a row per setting."""
    batches = batches_of(kind, rows, size, steps)
    unique = [len(hostdev.unique(batch.ids.ravel())[0]) for batch in batches]
    tables, model = tables_of(rows), Simulated(max(unique))
    staging = Staging(torch.device("cpu"))
    pipelines = {depth: Pipeline(model, tables, staging, depth=depth) for depth in (0, *depths)}
    conflicts = statistics.mean(
        len(np.intersect1d(first.ids, second.ids)) for first, second in itertools.pairwise(batches[:5])
    )
    model.seconds = 0.0
    serial, plain = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        plain_loop(tables, model, batches)
        plain.append((time.perf_counter() - start) / steps)
        serial.append(per_step(pipelines[0], batches))
    host = statistics.median(serial[1:])
    overhead = statistics.median(ours / theirs for ours, theirs in zip(serial[1:], plain[1:], strict=True)) - 1
    print(f"\n{kind} ids, V = {rows:,}, batch {size:,}: {statistics.mean(unique):,.0f} rows a step, of which "
          f"{conflicts / statistics.mean(unique):.1%} are the next one's too")  # fmt: skip
    print(f"host {host * 1e3:.2f} ms a step; depth 0 against a plain loop {overhead:+.1%}\n")
    print(f"{'device/host':>14}{'depth':>7}{'step ms':>10}{'serial ms':>11}{'over the larger':>17}{'stall':>9}")
    results = [{"ids": kind, "host_ms": round(host * 1e3, 3), "depth_0_overhead": round(overhead, 4)}]
    for factor in FACTORS:
        times: dict[int, list[tuple[float, float, float, float]]] = {depth: [] for depth in depths}
        for _ in range(rounds):
            model.seconds = 0.0
            host = per_step(pipelines[0], batches)
            model.seconds = host * factor
            for depth in depths:
                pipelines[depth].timeline = Timeline()
                step = per_step(pipelines[depth], batches)
                stall = pipelines[depth].timeline.summary()["stall_us"]["step"] / 1e6 / steps
                times[depth].append((step, host + model.seconds, step / max(host, model.seconds), stall / step))
        for depth in depths:
            step, alone, ratio, stall = (statistics.median(column) for column in zip(*times[depth], strict=True))
            print(f"{factor:>14}{depth:>7}{step * 1e3:>10.2f}{alone * 1e3:>11.2f}{ratio:>17.2f}{stall:>9.0%}")
            results.append({"ids": kind, "device_over_host": factor, "depth": depth, "step_ms": round(step * 1e3, 3),
                            "over_max": round(ratio, 3)})  # fmt: skip
    return results


def on_accelerator(device: torch.device, depths: list[int], steps: int) -> list[dict]:
    """Whole training steps at the default sizes: host tables at every depth against device tables."""
    rows, size = 184_965, 16_000
    backend.make_deterministic(device)
    batches = batches_of("Zipf", rows, size, steps)
    batches = [Batch(batch.label, batch.ids, np.ones_like(batch.weights)) for batch in batches]
    results = []
    print(f"\n{backend.describe(device)}, V = {rows:,}, batch {size:,}, D = {DIM}\n")
    for precision in ("fp32", "bf16"):
        for mix, depth in [(False, 0), (False, 2), (True, 0), *((True, depth) for depth in depths)]:
            trainer = Trainer(rows, DIM, host_device_mix=mix, device=device, l2="none", precision=precision, seed=1,
                              log=OpLog(), depth=depth)  # fmt: skip
            times = [per_step(trainer.pipeline, batches) for _ in range(3)]
            name = f"{precision} {'host' if mix else 'device'} tables, depth {depth}"
            print(f"{name:<40}{min(times) * 1e3:>10.2f} ms{size / min(times):>14,.0f} samples/s")
            step = min(times)
            results.append({"run": name, "step_ms": round(step * 1e3, 3), "samples_per_s": round(size / step)})
    return results


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="of the tables (D = 80)")
    parser.add_argument("--batch-size", type=int, default=4000)
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes = (arguments.rows, arguments.batch_size, arguments.depths, arguments.steps, arguments.rounds)
    results = [*simulated("uniform", *sizes), *simulated("Zipf", *sizes)]
    device = backend.select("auto")
    real: list[dict] = []
    if backend.is_accelerator(device):
        real = on_accelerator(device, arguments.depths, arguments.steps)
    else:
        print("\nno accelerator: whole training steps on one were not measured")
    versions = {"hostdev": hostdev.__version__, "numba": numba.__version__, "torch": torch.__version__}
    content = {"threads": host_threads(), "versions": versions, "simulated": results, "accelerator": real}
    print(f"\nwritten to {record('pipeline', content)}")


if __name__ == "__main__":
    main()
