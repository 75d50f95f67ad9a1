"""One of the processes that the benchmark `ranks` measures: answers calls that it reads as lines of JSON.

Every process has one thread for kernels and one for torch, and may be bound to one CPU, like a machine with one core.
"""

import gc
import itertools
import os
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.bench_pipeline import make_batches
from bench.simulated import Simulated
from bench.team import serve
from bench.wide_deep import FIELDS
from bench.workload import training_ids
from hostdev.core.micro_batches import cut, get_nodes
from hostdev.core.optimizers import FTRL, LazyAdam
from hostdev.data.batch import Batch
from hostdev.data.schema import Column, Schema, Space
from hostdev.device.staging import Staging
from hostdev.distributed.dense import DenseGradients
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment
from hostdev.distributed.world import ALONE_WORLD
from hostdev.host.table import HostTable
from hostdev.kernels.pool import set_host_threads
from hostdev.models.wide_deep.network import LAYERS, WideDeep
from hostdev.pipeline.batch_ids import Group, Request
from hostdev.pipeline.pipeline import Pipeline
from hostdev.pipeline.results import Gradients, StepBatch
from hostdev.train.trainer import StepSettings, Trainer

ALONE_WITH_RANKS = "BENCH_RANKS_PORT"  # a port for a rank that exchanges with itself
FIRST_CPU = "BENCH_RANKS_CPU"  # the first rank's CPU, as an index into the available CPUs; without it none is bound
LEVELS = "BENCH_RANKS_LEVELS"  # levels of the exchange between ranks
BATCHES = 20  # number of batches, through which a run cycles
SETTLE = 4  # steps before a measurement
EXCHANGED = ("ids", "rows", "late rows", "gradients")


def dense_side(dim: int, layers: list[int]) -> list[nn.Parameter]:
    """Return parameters with the shapes of Wide & Deep's dense side."""
    sizes = [FIELDS * dim, *layers, 1]
    shapes = [shape for first, second in itertools.pairwise(sizes) for shape in ((first, second), (second,))]
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


class Sum(nn.Module):
    """Parameters whose gradients take hardly any time to compute, so that only their exchange is timed."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self, one: Tensor) -> Tensor:
        return torch.stack([parameter.sum() for parameter in self.held]).sum() * one


class Worker:
    """Answers the benchmark's calls: each method is one call, and returns a JSON value."""

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = ranks
        self.rank, self.size = (0, 1) if ranks is None else ranks.part()
        self._open = ExitStack()
        self.not_ready, self.in_two = True, False  # whether the first gradients are unknown here, known to all
        self._runs: dict[int, _Run] = {}
        self._steps: Any = None  # an iterator over training steps
        self._sent: Any = None  # returns the bytes sent so far, and the least possible
        self._taken = 0  # training steps

    def close(self) -> None:
        """End the current run."""
        self._open.close()
        self._open, self._steps, self._sent, self._runs = ExitStack(), None, None, {}
        gc.collect()  # tables in reference cycles would stay in memory beside the next ones

    def training(
        self, rows: int, dim: int, batch: int, layers: list[int] | None, micro_batches: int, depth: int
    ) -> None:
        """Start to train Wide & Deep, whose tables the ranks share."""
        columns = tuple(Column(f"c{i}", "id", "values") for i in range(FIELDS))
        schema = Schema("label", (), columns, (Space("values", 0, 1, rows - 1),), rows)
        model = WideDeep(schema, dim, seed=1, layers=LAYERS if layers is None else layers)
        trainer = Trainer(
            model,
            host_device_mix=True,
            device=torch.device("cpu"),
            steps=StepSettings(1, micro_batches=micro_batches),
            depth=depth,
            world=self.ranks or ALONE_WORLD,
        )
        start, stop = cut(batch, self.size)[self.rank]
        rng, made = np.random.default_rng(0), []
        ids = training_ids(rows, batch)
        for _ in range(BATCHES):
            mine = rng.permuted(ids, axis=0)[start:stop]
            label = (rng.random(batch) < 0.25).astype(np.float32)[start:stop]
            made.append(Batch(label, np.empty((len(mine), 0), np.float32), mine, {}, batch))
        steps = trainer.train(itertools.cycle(made))
        self._open.callback(steps.close)
        self._steps = steps
        self._sent = trainer.runtime.exchanged_bytes if self.ranks is not None else None

    def pipeline(self, rows: int, dim: int, batch: int, kind: str, depths: list[int], layers: list[int]) -> None:
        """Start passes on a simulated device, which waits and then exchanges dense gradients with the other ranks."""
        batches = [ids[slice(*cut(batch, self.size)[self.rank])] for ids in make_batches(kind, rows, batch, BATCHES)]
        self._runs = {depth: _Run(self, batches, rows, dim, depth) for depth in depths}
        for run in self._runs.values():
            self._open.callback(run.close)
        self._dense = None
        if self.ranks is not None:
            self._parameters = dense_side(dim, layers)
            self._grads = [torch.full_like(each, 1e-3, requires_grad=False) for each in self._parameters]
            self._dense = DenseGradients(self.ranks.channel(), self._parameters, 1)
            self._open.callback(self._dense.close)

    def shape(self) -> dict[str, float]:
        """Return a batch's mean numbers of ids and unique ids of this rank, and of unique rows requested from it."""
        run = next(iter(self._runs.values()))
        return {
            "ids": float(np.mean([ids.size for ids in run.batches])),
            "asked": float(np.mean([len(np.unique(ids)) for ids in run.batches])),
            "owned": run.owned,
        }

    def pipeline_steps(self, depth: int, steps: int, seconds: float, dense: bool) -> float:
        """Return the seconds of a step whose device waits `seconds`, with or without the dense exchange."""
        run = self._runs[depth]
        run.device.seconds, run.dense = seconds, dense
        return run.per_step(steps)

    def dense_steps(self, steps: int) -> float:
        """Return the seconds of a step's dense exchange in the steady state."""
        _timed(self.exchange_dense, SETTLE)
        return _timed(self.exchange_dense, steps)

    def exchange_dense(self) -> None:
        """Sum the gradients of all ranks, with the other exchanges of a step."""
        if self._dense is None or self.ranks is None:
            return
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        has = self._dense.put()
        not_ready = self.ranks.control.exchange_counts(np.full((self.size, 8), self.not_ready, np.int64))
        self.in_two = not not_ready.any()
        self._dense.small(torch.zeros(3))
        self._dense.finish(has or [])

    def take(self, steps: int) -> float:
        """Return the seconds of a training step."""
        for _ in range(SETTLE):
            next(self._steps)
        self._taken += SETTLE + steps
        return _timed(lambda: next(self._steps), steps)

    def sent(self) -> dict[str, int] | None:
        """Return the bytes sent to other ranks so far, and the steps taken; None for a single rank."""
        return None if self._sent is None else {**self._sent(), "steps": self._taken}

    def trees(self, dim: int, layers: list[int], micro_batches: int, rounds: int) -> dict[str, float]:
        """Return the seconds of exchanging a dense side's gradients: ours, DDP's, and all-reduces of buckets alone.

        Ours and DDP's include the backward pass of a sum over all parameters, whose own time is `backward`.
        """
        assert self.ranks is not None
        each = micro_batches // self.size
        one = torch.ones(())
        ours, theirs, alone = (Sum(dense_side(dim, layers)) for _ in range(3))
        dense = DenseGradients(self.ranks.channel(), list(ours.parameters()), each)
        data_parallel = DistributedDataParallel(theirs)
        flat = torch.cat([parameter.detach().view(-1) for parameter in alone.parameters()])

        def backward() -> None:
            alone.zero_grad()
            alone(one).backward()

        def tree() -> None:
            ours.zero_grad()
            for part in range(each):
                if part == each - 1:
                    dense.expect_last()
                ours(one).backward()
                has = dense.put()
            dense.finish(has or [])

        def ddp() -> None:
            theirs.zero_grad()
            data_parallel(one).backward()

        def all_reduce() -> None:
            for bucket in flat.split(25 << 18):
                dist.all_reduce(bucket)

        what = {"backward": backward, "tree": tree, "ddp": ddp, "all_reduce": all_reduce}
        found: dict[str, list[float]] = {name: [] for name in what}
        for number in range(rounds + 3):
            for name, call in what.items():
                self.ranks.control.barrier()
                seconds = _timed(call, 1)
                if number >= 3:
                    found[name].append(seconds)
        dense.close()
        return {
            **{name: float(np.median(each)) for name, each in found.items()},
            **{f"{name} / ddp": float(np.median(np.array(found[name]) / np.array(found["ddp"]))) for name in what},
            "bytes": 4 * len(flat),
            "nodes": len(get_nodes(0, each)),
        }

    def copying(self, rounds: int) -> float:
        """Return the seconds per byte of a copy of 64 MiB."""
        values, there = np.zeros(16 << 20, np.float32), np.zeros(16 << 20, np.float32)
        return float(np.median([_timed(lambda: np.copyto(there, values), 2) for _ in range(rounds)])) / values.nbytes

    def links(self, rounds: int, count: int = 4 << 20) -> dict[str, float]:
        """Return the seconds of an empty all-to-all, and the bytes per second of one of `count` values to each rank.

        An empty all-to-all follows some work, as in a step, so that waiting ranks are asleep and one rank arrives last.
        Means of 20 are used, because some calls wait for the scheduler's next tick.
        """
        assert self.ranks is not None
        channel = self.ranks.control
        values = torch.zeros(count * (self.size - 1))
        counts = [0 if rank == self.rank else count for rank in range(self.size)]
        turns = itertools.cycle([torch.ones_like(values) for _ in range(8)])  # received values are not in the cache
        nothing, none = torch.zeros(0), [0] * self.size
        source, there = np.zeros(1 << 20, np.float32), np.zeros(1 << 20, np.float32)

        def works() -> None:
            np.copyto(there, source)

        def meets() -> None:
            works()
            channel.all_to_all(nothing, none, none)

        least, most = [], []
        for _ in range(rounds):
            channel.barrier()
            alone = _timed(works, 20)
            channel.barrier()
            least.append(max(_timed(meets, 20) - alone, 0.0))
            most.append(_timed(lambda: channel.all_to_all(next(turns), counts, counts, out=next(turns)), 3))
        return {"seconds": float(np.median(least)), "bytes_per_s": values.nbytes / float(np.median(most))}


class _Run:
    """A pipeline of some depth on the simulated device."""

    def __init__(self, worker: Worker, batches: list[np.ndarray], rows: int, dim: int, depth: int) -> None:
        ranks = worker.ranks
        part = None if ranks is None else ranks.part()
        tables = [
            HostTable(rows, 1, FTRL(), name="wide", part=part),
            HostTable(rows, dim, LazyAdam(), name="deep", part=part),
        ]
        most = max(len(np.unique(ids)) for ids in batches)
        self.device, self.dense = Simulated(most, (1, dim)), False
        self._worker, self.batches = worker, batches
        self._sizes: list[int] = []
        self._pipeline = Pipeline(
            [Group(tables, None)], Staging(torch.device("cpu")), depth=depth, world=ranks or ALONE_WORLD
        )
        requests = [Request(None, len(ids), [[ids.ravel()]]) for ids in batches]
        self._open = ExitStack()
        self._pass = self._open.enter_context(self._pipeline.train(itertools.cycle(requests)))

    def step(self) -> None:
        """Take the next step."""
        flight = self._pass.take()
        self._sizes.append(len(flight.groups[0].planned.ids))
        gradients = self.device.step_of(flight)
        self._worker.not_ready = flight.first is None
        if self.dense:
            self._worker.exchange_dense()
        self._pass.finish(flight, self._to_others(flight, gradients))

    def _to_others(self, flight: StepBatch, gradients: Gradients) -> Gradients:
        if self._worker.ranks is None:
            return gradients
        parts = [[[grad] for grad in self.device.gradients(part.own_size)] for part in flight.groups]
        return Gradients(gradients.grads, parts=parts, in_two=self.dense and self._worker.in_two)

    @property
    def owned(self) -> float:
        """The mean number of unique rows that a batch requests from this rank."""
        return float(np.mean(self._sizes))

    def per_step(self, steps: int) -> float:
        """Return the seconds of a step in the steady state."""
        for _ in range(SETTLE):
            self.step()
        return _timed(self.step, steps)

    def close(self) -> None:
        self._open.close()


def _timed(call: Any, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def main() -> None:
    """Join the other ranks, and answer calls until standard input ends."""
    torch.set_num_threads(1)
    set_host_threads(1)
    place = find_rank_environment()
    if FIRST_CPU in os.environ and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[place.rank + int(os.environ[FIRST_CPU])]})

    def fault(rank: int, why: str) -> None:
        os.write(2, f"rank {rank} of {place.ranks}: {why}\n".encode())
        os._exit(2)

    if ALONE_WITH_RANKS in os.environ:
        place = place._replace(port=int(os.environ[ALONE_WITH_RANKS]))
    levels = int(os.environ[LEVELS]) if LEVELS in os.environ else None
    worker = Worker(None if place.alone and not place.port else Ranks(place, fault, levels=levels))
    serve(worker)
    if worker.ranks is not None:
        worker.ranks.leave()


if __name__ == "__main__":
    main()
