"""One of the processes that the benchmark `parallel` measures; it has one thread for torch, on one CPU."""

import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hostdev
from bench.team import serve
from hostdev.core import pieces as segments
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.world import SCHEDULES
from hostdev.ext.parallel.pieces import cut, get_pieces

NETWORKS = Path(__file__).resolve().parents[1] / "examples" / "parallel"
OURS, TORCH = "hostdev", "torch"
_REPEATS = 4  # runs of each piece, of which the shortest counts


def make_network(kind: str, width: int, layers: int = 0, blocks: Sequence[int] = (3, 4, 6, 3)) -> nn.Sequential:
    """Return a network, the same on all ranks."""
    torch.manual_seed(1)
    if kind == "layers":
        return nn.Sequential(*(one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())))
    sys.path.insert(0, str(NETWORKS))
    from networks import resnet50

    return resnet50(width, blocks=blocks, small_images=True)


def make_batch(network: dict[str, Any], samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels for a network, the same on all ranks."""
    rng = torch.Generator().manual_seed(2)
    layers = network["kind"] == "layers"
    shape = (network["width"],) if layers else (3, 32, 32)
    labels = torch.randint(network["width"] if layers else 10, (samples,), generator=rng)
    return torch.randn(samples, *shape, generator=rng), labels


class Ours:
    """Steps of `hostdev.parallel.Network`."""

    def __init__(
        self,
        network: dict[str, Any],
        batch: int,
        micro_batches: int,
        schedule: str,
        begins: list[str],
        ranks: Ranks | None,
    ) -> None:
        self.inputs, self.labels = make_batch(network, batch)
        layout: dict[str, Any] = {} if ranks is None else {"schedule": schedule, "stage_cut": ",".join(begins)}
        self._network = hostdev.parallel.Network(
            make_network(**network), (self.inputs[:1],), ranks=ranks, micro_batches=micro_batches, **layout
        )
        self.parameters = self._network.parameters
        self._optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        self.on_part: Callable[[], object] = lambda: None  # called when a micro-batch begins, on the first stage

    def step(self) -> float | None:
        """Take a step; return the loss, or None on ranks that do not know it."""
        loss = self._pass()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _pass(self) -> float | None:
        return self._network.step(
            len(self.inputs), self._part, lambda output, part: cross_entropy(output, self.labels[part])
        )

    def _part(self, part: slice) -> tuple[Tensor]:
        self.on_part()
        return (self.inputs[part],)


class Torchs(Ours):
    """Steps of the same network with torch's own stages and schedule."""

    def __init__(
        self, network: dict[str, Any], batch: int, micro_batches: int, schedule: str, begins: list[str], ranks: Ranks
    ) -> None:
        from torch.distributed import pipelining  # takes seconds to load

        self.inputs, self.labels = make_batch(network, batch)
        parts = cut(get_pieces(make_network(**network)), begins)
        numbers = range(ranks.rank, len(parts), ranks.size)
        modules = [nn.Sequential(*(piece.call for piece in parts[number])) for number in numbers]  # type: ignore
        group = dist.new_group(list(range(ranks.size)))
        stages = [
            pipelining.PipelineStage(module, number, len(parts), torch.device("cpu"), group=group)
            for number, module in zip(numbers, modules, strict=True)
        ]
        kinds = (pipelining.Schedule1F1B, pipelining.ScheduleGPipe, pipelining.ScheduleInterleaved1F1B)
        kind: Any = kinds[SCHEDULES.index(schedule)]
        self._first, self._last = numbers[0] == 0, numbers[-1] == len(parts) - 1
        self._schedule = kind(
            stages if schedule == "interleaved" else stages[0],
            micro_batches,
            scale_grads=False,
            loss_fn=lambda output, labels: cross_entropy(output, labels) / micro_batches,
        )
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        self._optimizer = torch.optim.SGD(self.parameters, lr=0.01)

    def _pass(self) -> float | None:
        losses: list[Tensor] = []
        given = (self.inputs,) if self._first else ()
        wanted = {"target": self.labels, "losses": losses} if self._last else {}
        self._schedule.step(*given, **wanted, return_outputs=False)
        return float(torch.stack(losses).detach().sum()) if self._last else None


class Saved:
    """Counts the bytes that autograd keeps for backward passes: each storage once, and only new storages."""

    def __init__(self, before: Sequence[Tensor]) -> None:
        self._before = {one.untyped_storage().data_ptr() for one in before}
        self._users: dict[int, int] = {}
        self.now = self.peak = 0

    def keep(self, tensor: Tensor) -> "_Kept":
        return _Kept(self, tensor)

    def count(self, tensor: Tensor, by: int) -> None:
        memory = tensor.untyped_storage()
        at = memory.data_ptr()
        if at in self._before:
            return
        users = self._users[at] = self._users.get(at, 0) + by
        if (users, by) in ((1, 1), (0, -1)):
            self.now += by * memory.nbytes()
            self.peak = max(self.peak, self.now)


class _Kept:
    """A tensor that autograd keeps; the tensor is counted as long as this object lives."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self._saved, self.tensor = saved, tensor
        saved.count(tensor, 1)

    def __del__(self) -> None:
        self._saved.count(self.tensor, -1)


class Alive(TorchDispatchMode):
    """Counts the bytes that torch's operations in this thread have allocated and that are not freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), new=False)  # the arguments existed before
        result = func(*args, **(kwargs or {}))
        self._see(result, new=True)
        self.peak = max(self.peak, self.now)
        return result

    def _see(self, values: Any, *, new: bool) -> None:
        for one in tree_leaves(values):
            if isinstance(one, Tensor) and one.device.type == "cpu":
                memory = one.untyped_storage()
                if memory._cdata not in self._known:
                    size = memory.nbytes() if new else 0
                    self._known.add(memory._cdata)
                    self.now += size
                    weakref.finalize(memory, self._gone, memory._cdata, size).atexit = False

    def _gone(self, number: int, size: int) -> None:
        self._known.remove(number)
        self.now -= size


class Worker:
    """Answers the benchmark's calls: each method is one call, and returns a JSON value."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._runs: dict[str, dict[str, Ours]] = {}

    def costs(self, network: dict[str, Any], samples: int, repeats: int) -> list[tuple[str, float]]:
        """Return the names of a network's pieces, and each one's seconds for a micro-batch, forward and backward."""
        pieces, found = get_pieces(make_network(**network)), []
        for _ in range(_REPEATS * repeats):
            values, seconds = torch.randn(make_batch(network, samples)[0].shape), []
            for piece in pieces:
                begin = time.perf_counter()
                result = segments.run([piece], values)
                trained = [one for one in (values, *piece.parameters) if one.requires_grad]
                if trained:
                    torch.autograd.grad(result, trained, torch.ones_like(result))
                seconds.append(time.perf_counter() - begin)
                values = result.detach().requires_grad_()
            found.append(seconds)
        rounds = [found[at : at + _REPEATS] for at in range(0, len(found), _REPEATS)]
        least = [[min(seconds) for seconds in zip(*each, strict=True)] for each in rounds]
        each = [statistics.median(seconds) for seconds in zip(*least, strict=True)]
        return [(piece.name, seconds) for piece, seconds in zip(pieces, each, strict=True)]

    def make(self, key: str, begins: list[str], **what: Any) -> dict[str, float | None]:
        """Make a network for hostdev and for torch; return the loss of each one's first step."""
        self._runs[key] = {OURS: Ours(begins=begins, ranks=self._ranks, **what)}
        if self._ranks is not None:
            self._runs[key][TORCH] = Torchs(begins=begins, ranks=self._ranks, **what)
        first = {who: run.step() for who, run in self._runs[key].items()}
        for run in self._runs[key].values():  # another step, to warm up
            run.step()
        return first

    def take(self, key: str, steps: int) -> dict[str, list[float]]:
        """Return the seconds of steps of hostdev and of torch, which take turns."""
        found: dict[str, list[float]] = {who: [] for who in self._runs[key]}
        for number in range(steps):
            for who in sorted(found, reverse=number % 2 == 1):
                run = self._runs[key][who]
                if self._ranks is not None:
                    self._ranks.control.barrier()
                start = time.perf_counter()
                run.step()
                found[who].append(time.perf_counter() - start)
        return found

    def memory(self, **what: Any) -> dict[str, int]:
        """Return a step's peak bytes on this rank: kept by autograd, in all and for one micro-batch, and allocated."""
        assert self._ranks is not None
        found: dict[str, int] = {}
        for who, run in ((OURS, Ours(ranks=self._ranks, **what)), (TORCH, Torchs(ranks=self._ranks, **what))):
            run.step()
            saved = Saved([*run.parameters, run.inputs, run.labels])
            first: list[int] = []  # bytes kept when each micro-batch begins
            if who == OURS:
                run.on_part = lambda first=first, saved=saved: first.append(saved.now)  # type: ignore[misc]
            with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda kept: kept.tensor):
                run.step()
            with Alive() as alive:
                run.step()
            found |= {f"{who} saved": saved.peak, f"{who} left": saved.now, f"{who} all": alive.peak}
            if first:
                found["micro-batch"] = first[1]
        return found

    def close(self) -> None:
        self._runs = {}


def work(first_cpu: int) -> None:
    """Join the other ranks, and answer calls until standard input ends."""
    torch.set_num_threads(1)
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[(first_cpu + rank) % len(cpus)]})
    with hostdev.join(f"pipe={size}" if size > 1 else None) as ranks:
        worker = Worker(ranks)
        serve(worker)


if __name__ == "__main__":
    work(int(sys.argv[1]))
