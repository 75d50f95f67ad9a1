"""Claims: stages reach 0.85 of what a pipeline can, take at most 1.05x torch's bare schedule, and 1F1B's memory stays.

Each rank has one thread for torch and one CPU, to which it is bound. There are P = 2 stages and M = 8 micro-batches of
two networks: equal layers, and a narrow ResNet-50 that is cut where the measured costs of its pieces balance.

(a) Samples a second of `hostdev.Network` on two ranks over those of one rank: at least 0.85 x M / (M + P - 1) x P. One
    rank is measured while the other CPU is idle, and beside another one that does the same: two busy cores share the
    memory's bandwidth, and often the processor's clock.
(b) Steps over those of torch's own schedule for the same network, cut, micro-batches, loss and optimizer, written
    with torch.distributed.pipelining and nothing else: at most 1.05x. The same processes take one and the other.
(c) Bytes that autograd keeps for the backward pass on stage 0 at their peak, counted: with 1F1B in proportion to the
    number of stages, whatever M. Beside them all bytes that a step takes, with gradients and what has crossed; not
    what is there from step to step, as torch's own memory for what crosses is.

A step is forward, backward and update, from a barrier to the last rank's end. One rank, one beside another, and two
ranks with each schedule take turns, round after round; medians, of the ratios too.
"""

import hostdev.core.environment  # isort: skip  (before torch)

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from record import record
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hostdev
from hostdev.distributed.mesh import SCHEDULES
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.start import start_here
from hostdev.parallel.costs import profile_of
from hostdev.parallel.layout import like
from hostdev.parallel.pieces import balanced, cut, get_pieces

NETWORKS = Path(__file__).resolve().parents[1] / "examples" / "parallel"
RANKS, MICRO_BATCHES = 2, 8
EFFICIENCY, MOST_OVER_TORCH = 0.85, 1.05
CLAIMED = SCHEDULES[:2]  # the third is there for information
CLOSE = 1e-4  # of the loss: torch adds gradients in another order
MEMORY_STAGES, MEMORY_COUNTS = (RANKS, 4), (2, 4, 8, 16)  # of micro-batches
MEMORY_LAYERS, MEMORY_WIDTH, MEMORY_SAMPLES = 4, 128, 256  # of a stage, of each layer, of a micro-batch
OURS, TORCH = "hostdev", "torch"
Times = dict[str, dict[str, list[float]]]  # seconds of steps, by schedule and by whose they are


class Case(NamedTuple):
    """A network that is measured, and its batches."""

    name: str
    network: dict[str, Any]
    batch: int
    schedules: Sequence[str] = SCHEDULES


CASES = [
    Case("8 x Linear(1024), ReLU", {"kind": "layers", "layers": 8, "width": 1024}, 2048),
    Case("ResNet-50, width 16", {"kind": "resnet50", "width": 16}, 64),
]
QUICK_CASES = [
    Case("8 x Linear(64), ReLU", {"kind": "layers", "layers": 8, "width": 64}, 256),
    Case("ResNet, width 4", {"kind": "resnet50", "width": 4, "blocks": [1, 1, 1, 1]}, 16, CLAIMED[:1]),
]


def made(kind: str, width: int, layers: int = 0, blocks: Sequence[int] = (3, 4, 6, 3)) -> nn.Sequential:
    """Return a network, on all ranks the same."""
    torch.manual_seed(1)
    if kind == "layers":
        return nn.Sequential(*(one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())))
    sys.path.insert(0, str(NETWORKS))
    from networks import resnet50

    return resnet50(width, blocks=blocks, small_images=True)


def batch_of(network: dict[str, Any], samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels for a network, on all ranks the same."""
    rng = torch.Generator().manual_seed(2)
    layers = network["kind"] == "layers"
    shape = (network["width"],) if layers else (3, 32, 32)
    labels = torch.randint(network["width"] if layers else 10, (samples,), generator=rng)
    return torch.randn(samples, *shape, generator=rng), labels


class Ours:
    """Steps of `hostdev.Network`."""

    def __init__(
        self, network: dict[str, Any], batch: int, micro_batches: int, schedule: str, begins: list[str],
        ranks: Ranks | None,
    ) -> None:  # fmt: skip
        self.inputs, self.labels = batch_of(network, batch)
        layout: dict[str, Any] = {} if ranks is None else {"schedule": schedule, "stage_cut": ",".join(begins)}
        self._network = hostdev.Network(
            made(**network), (self.inputs[:1],), ranks=ranks, micro_batches=micro_batches, **layout
        )  # fmt: skip
        self.parameters = self._network.parameters
        self._optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        self.on_part: Callable[[], object] = lambda: None  # called when a micro-batch begins, where the network does

    def step(self) -> float | None:
        """Take a step; return the loss, where it is known."""
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
    """Steps of the same, as torch's users write them: torch's stages, and its schedule."""

    def __init__(
        self, network: dict[str, Any], batch: int, micro_batches: int, schedule: str, begins: list[str], ranks: Ranks
    ) -> None:
        from torch.distributed import pipelining  # takes seconds to load

        self.inputs, self.labels = batch_of(network, batch)
        parts = cut(get_pieces(made(**network)), begins)
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
            stages if schedule == "interleaved" else stages[0], micro_batches, scale_grads=False,
            loss_fn=lambda output, labels: cross_entropy(output, labels) / micro_batches,
        )  # fmt: skip
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        self._optimizer = torch.optim.SGD(self.parameters, lr=0.01)

    def _pass(self) -> float | None:
        losses: list[Tensor] = []
        given = (self.inputs,) if self._first else ()
        wanted = {"target": self.labels, "losses": losses} if self._last else {}
        self._schedule.step(*given, **wanted, return_outputs=False)
        return float(torch.stack(losses).detach().sum()) if self._last else None


class Saved:
    """Counts the bytes that autograd keeps for backward passes, each memory once, but what has been there before."""

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
    """A tensor that autograd keeps, until it lets go of this."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self._saved, self.tensor = saved, tensor
        saved.count(tensor, 1)

    def __del__(self) -> None:
        self._saved.count(self.tensor, -1)


class Alive(TorchDispatchMode):
    """Counts the bytes of all memory that torch's operations take in this thread, until it is let go of."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), new=False)  # there before
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
    """What a process can be told; each method is one thing, and returns what JSON can hold."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._runs: dict[str, dict[str, Ours]] = {}

    def costs(self, network: dict[str, Any], samples: int, repeats: int) -> list[tuple[str, float]]:
        """Return the pieces of a network, and the seconds that each takes for a micro-batch, forward and back."""
        whole = made(**network)
        pieces, inputs = get_pieces(whole), like(batch_of(network, 1)[:1])
        found = [
            [piece.seconds for piece in profile_of(whole, pieces, inputs, samples, torch.device("cpu"), None, False)[0]]
            for _ in range(repeats)
        ]
        each = [statistics.median(seconds) for seconds in zip(*found, strict=True)]
        return [(piece.name, seconds) for piece, seconds in zip(pieces, each, strict=True)]

    def make(self, key: str, begins: list[str], **what: Any) -> dict[str, float | None]:
        """Make a network, ours and torch's; return what the loss of the first step is to both."""
        self._runs[key] = {OURS: Ours(begins=begins, ranks=self._ranks, **what)}
        if self._ranks is not None:
            self._runs[key][TORCH] = Torchs(begins=begins, ranks=self._ranks, **what)
        first = {who: run.step() for who, run in self._runs[key].items()}
        for run in self._runs[key].values():  # once more, to warm up
            run.step()
        return first

    def take(self, key: str, steps: int) -> dict[str, list[float]]:
        """Return the seconds of steps, ours and torch's in turn, first the one and then the other first."""
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
        """Return the bytes of a step here at their peak: saved by autograd, of a micro-batch first; and all of them."""
        assert self._ranks is not None
        found: dict[str, int] = {}
        for who, run in ((OURS, Ours(ranks=self._ranks, **what)), (TORCH, Torchs(ranks=self._ranks, **what))):
            run.step()
            saved = Saved([*run.parameters, run.inputs, run.labels])
            first: list[int] = []  # what is kept when each micro-batch begins
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


class Team:
    """Processes that do the same at the same time: ranks of stages, or copies that know nothing of each other."""

    def __init__(self, ranks: int, copies: int = 1) -> None:
        how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes: list[Any] = []
        self._ready = False
        for copy in range(copies):
            command = [sys.executable, __file__, "--worker", str(copy * ranks)]
            self._processes += start_here(ranks, command, **how)

    def ask(self, call: str, *, first: bool = False, **what: Any) -> list[Any]:
        """Let all do something, or the first one only; return what each says."""
        if not self._ready:
            self._ready = bool(self._heard(self._processes))
        asked = self._processes[: 1 if first else None]
        for process in asked:
            process.stdin.write(json.dumps({"call": call, **what}) + "\n")
            process.stdin.flush()
        return self._heard(asked)

    def _heard(self, asked: Sequence[Any]) -> list[Any]:
        lines = [process.stdout.readline() for process in asked]
        if not all(lines):
            sys.exit("bench_parallel: a process has failed")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


def stages_of(case: Case, costs: Sequence[tuple[str, float]], count: int) -> tuple[list[str], list[float]]:
    """Return with which pieces the second and later of so many stages begin, and the part of the time of each stage."""
    names, seconds = map(list, zip(*costs, strict=True))
    if case.network["kind"] == "layers":
        begins = [names[len(names) * number // count] for number in range(1, count)]
    else:
        begins = balanced(get_pieces(made(**case.network)), seconds, count)
    edges = [0, *map(names.index, begins), len(names)]
    return begins, [sum(seconds[start:stop]) / sum(seconds) for start, stop in itertools.pairwise(edges)]


def speed(one: Team, two: Team, case: Case, steps: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Measure a network's steps, (a) and (b) above; print and return what comes of it."""
    each: dict[str, Any] = {"samples": case.batch // MICRO_BATCHES, "repeats": 1 if quick else 5}
    [costs] = one.ask("costs", network=case.network, first=True, **each)
    what: dict[str, Any] = {"network": case.network, "batch": case.batch, "micro_batches": MICRO_BATCHES}
    losses = [first[OURS] for first in one.ask("make", key="", begins=[], schedule="", **what)]
    content: dict[str, Any] = {"network": case.name, "batch": case.batch, "schedules": []}
    for schedule in case.schedules:
        begins, shares = stages_of(case, costs, RANKS * (1 + (schedule == "interleaved")))
        found = two.ask("make", key=schedule, begins=begins, schedule=schedule, **what)
        if any(first[OURS] != losses[0] for first in found) or abs(found[-1][TORCH] - losses[0]) > CLOSE:
            sys.exit(f"bench_parallel: {case.name}: the losses differ: one rank has {losses[0]}, others {found}")
        ranks = [sum(shares[rank::RANKS]) for rank in range(RANKS)]
        row = {"schedule": schedule, "begins": begins, "shares": [round(share, 4) for share in ranks]}
        content["schedules"].append(row)
    turns: dict[str, list[float]] = {"alone": [], "beside": [], **{schedule: [] for schedule in case.schedules}}
    taken: Times = {schedule: {OURS: [], TORCH: []} for schedule in case.schedules}
    for _ in range(rounds):
        [alone] = one.ask("take", key="", steps=steps, first=True)
        turns["alone"].append(statistics.median(alone[OURS]))
        beside = [statistics.median(found[OURS]) for found in one.ask("take", key="", steps=steps)]
        turns["beside"].append(statistics.harmonic_mean(beside))  # of the mean of both rates
        for schedule in case.schedules:
            come = two.ask("take", key=schedule, steps=steps)
            for who, so_far in taken[schedule].items():
                now = [max(seconds) for seconds in zip(*(found[who] for found in come), strict=True)]
                so_far += now
                if who == OURS:
                    turns[schedule].append(statistics.median(now))
    for team in (one, two):
        team.ask("close")
    return told(case, content, turns, taken, claims=not quick)


def told(
    case: Case, content: dict[str, Any], turns: dict[str, list[float]], taken: Times, *, claims: bool
) -> dict[str, Any]:
    """Print what has been measured of a network; return it with what was known before."""
    goal = EFFICIENCY * MICRO_BATCHES / (MICRO_BATCHES + RANKS - 1) * RANKS
    medians = {name: statistics.median(seconds) for name, seconds in turns.items()}
    print(f"\n{case.name}, batch {case.batch:,}: one rank {medians['alone'] * 1e3:,.0f} ms a step, beside another "
          f"{medians['beside'] * 1e3:,.0f} ms")  # fmt: skip
    print(f"{'':<14}{'parts of the time':<20}{'possible':>9}{'two ranks':>12}{'samples/s':>11}{'over one':>10}"
          f"{'over one beside':>17}{'bare torch':>13}{'over it':>9}{'in turn':>9}")  # fmt: skip
    content |= {"one_ms": _ms(medians["alone"]), "one_beside_ms": _ms(medians["beside"]), "goal": round(goal, 4)}
    for row in content["schedules"]:
        name, shares = row["schedule"], row["shares"]
        ours, theirs = (statistics.median(taken[name][who]) for who in (OURS, TORCH))
        over = {kind: _ratio(turns[kind], turns[name]) for kind in ("alone", "beside")}
        in_turn = _ratio(taken[name][OURS], taken[name][TORCH])
        each_rank = (len(row["begins"]) + 1) // RANKS  # stages
        possible = MICRO_BATCHES / (MICRO_BATCHES * max(shares) + (1 - max(shares)) / each_rank)
        parts = " + ".join(f"{share:.1%}" for share in shares)
        print(f"{name:<14}{parts:<20}{possible:>9.2f}{ours * 1e3:>9,.0f} ms{case.batch / ours:>11,.0f}"
              f"{over['alone']:>10.2f}{over['beside']:>17.2f}{theirs * 1e3:>10,.0f} ms{ours / theirs:>9.3f}"
              f"{in_turn:>9.3f}")  # fmt: skip
        row |= {"two_ms": _ms(ours), "torch_ms": _ms(theirs), "possible": round(possible, 3),
                "over_one": round(over["alone"], 3), "over_one_beside": round(over["beside"], 3),
                "over_torch": round(ours / theirs, 3), "over_torch_in_turn": round(in_turn, 3)}  # fmt: skip
    for row in content["schedules"]:
        if claims and row["schedule"] in CLAIMED:
            for key, words in (("over_one", "one rank"), ("over_one_beside", "one rank beside another")):
                what = f"{row['schedule']}: {row[key]:.3f} times the samples/s of {words}, at least {goal:.3f}"
                _tell(row[key] >= goal, what)
            what = f"{row['schedule']}: {row['over_torch']:.3f} times torch's own step, at most {MOST_OVER_TORCH}"
            _tell(row["over_torch"] <= MOST_OVER_TORCH, what)
    return content


def memory(teams: dict[int, Team], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Count the bytes of a step, (c) above; print and return a row per number of stages and of micro-batches."""
    print(f"\nbytes at their peak; {MEMORY_LAYERS} x Linear({MEMORY_WIDTH}), ReLU a stage, micro-batches of "
          f"{MEMORY_SAMPLES}, {MEMORY_LAYERS * (MEMORY_WIDTH + 1) * MEMORY_WIDTH * 4:,} of parameters")  # fmt: skip
    print(f"{'':<8}{'stages':>7}{'M':>4}{'micro-batches':>14}{'kept on 0':>14}{'torch':>10}{'all on 0':>17}"
          f"{'torch':>13}{'all on last':>17}{'torch':>13}")  # fmt: skip
    rows = []
    for schedule in CLAIMED:
        for stages, team in teams.items():
            network = {"kind": "layers", "layers": MEMORY_LAYERS * stages, "width": MEMORY_WIDTH}
            begins = [str(2 * MEMORY_LAYERS * number) for number in range(1, stages)]
            for count in (one for one in counts if one >= stages):
                come = team.ask("memory", network=network, batch=count * MEMORY_SAMPLES, micro_batches=count,
                                schedule=schedule, begins=begins)  # fmt: skip
                assert not any(found[f"{who} left"] for found in come for who in (OURS, TORCH)), "autograd still keeps"
                [first, *_, last] = come
                units = first[f"{OURS} saved"] / first["micro-batch"]
                columns = ((first, "saved", 10), (first, "all", 13), (last, "all", 13))
                print(f"{schedule:<8}{stages:>7}{count:>4}{units:>14g}" + "".join(
                    f"{found[f'{who} {key}']:>{width + 4 * (who == OURS)},}"
                    for found, key, width in columns for who in (OURS, TORCH)))  # fmt: skip
                rows.append({"schedule": schedule, "stages": stages, "micro_batches": count, "kept": units,
                             "stage_0": first, "last_stage": last})  # fmt: skip
    as_stages = all(row["kept"] == row["stages"] for row in rows if row["schedule"] == CLAIMED[0])
    _tell(as_stages, f"{CLAIMED[0]}: stage 0 keeps as many micro-batches as there are stages, whatever M")
    return rows


def _ratio(these: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(this / other for this, other in zip(these, others, strict=True))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _tell(met: bool, what: str) -> None:
    print(f"{what}: {'met' if met else 'not met'}")


def work(first_cpu: int) -> None:
    """Meet the others, and do what comes line by line until there is no more."""
    torch.set_num_threads(1)
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[(first_cpu + rank) % len(cpus)]})
    with hostdev.join(f"pipe={size}" if size > 1 else None) as ranks:
        worker = Worker(ranks)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            what = json.loads(line)
            print(json.dumps(getattr(worker, what.pop("call"))(**what)), flush=True)
        worker.close()


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of a round (2)")
    parser.add_argument("--rounds", type=int, help="(5)")
    parser.add_argument("--only", choices=("speed", "memory"), help="one part instead of both")
    parser.add_argument("--quick", action="store_true", help="tiny networks, which show that all works, and no speed")
    parser.add_argument("--out", type=Path, help="where the result goes instead of bench/results/")
    parser.add_argument("--worker", type=int, metavar="CPU", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker)
        return
    if (os.cpu_count() or 1) < RANKS:
        sys.exit("bench_parallel: two ranks need two CPUs")
    content: dict[str, Any] = {"versions": {"hostdev": hostdev.__version__, "torch": torch.__version__}}
    content |= {"quick": arguments.quick, "micro_batches": MICRO_BATCHES, "ranks": RANKS}
    quick, two = arguments.quick, Team(RANKS)
    one = None if arguments.only == "memory" else Team(1, copies=1 if quick else 2)
    if arguments.only in (None, "memory"):
        teams = {stages: two if stages == RANKS else Team(stages) for stages in MEMORY_STAGES}
        content["memory"] = memory(teams, MEMORY_COUNTS[1:3] if quick else MEMORY_COUNTS)
        for team in teams.values():
            if team is not two:
                team.close()
    if one is not None:
        how = arguments.steps or (1 if quick else 2), arguments.rounds or (1 if quick else 5)
        content["speed"] = [speed(one, two, case, *how, quick=quick) for case in (QUICK_CASES if quick else CASES)]
        one.close()
    two.close()
    name = "parallel-quick" if quick else "parallel"
    print(f"\nwritten to {record(name, content, arguments.out)}")


if __name__ == "__main__":
    main()
