"""Claim: the layout that `--parallel auto` takes on two processes is within 10% of the best layout.

The benchmark tries every mesh of two processes for four networks: samples; stages with every cut; slices with every
combination of strategies for up to three layers, or, for more layers, each layer alone and all in pairs. The candidates
are timed one after the other; the best ones are then timed longer, in turn, so that disturbances affect all of them.
Each process has one thread.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import hostdev
from bench.record import make_parser, record
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import start_processes, wait_for
from hostdev.distributed.world import Mesh
from hostdev.ext.parallel.plan import cuttable, divides

MOST = 1.10  # times the best layout's time
RANKS = 2
_SLICED = 3  # up to this many layers, all combinations of strategies are tried
_LAST = 6  # candidates that are timed again
NETWORKS = Path(__file__).resolve().parents[1] / "examples" / "parallel"


class Case(NamedTuple):
    """A network, its batch size and its number of micro-batches."""

    name: str
    layers: list[int]  # widths; empty for a narrow ResNet
    batch: int
    micro_batches: int = 8


CASES = [
    Case("ResNet-50, width 8", [], 32),
    Case("wide layers, few samples", [2048, 2048, 2048, 2048, 10], 64),
    Case("one layer that has all", [64, 8192, 64, 10], 512),
    Case("two layers that have all, two micro-batches", [512, 16384, 512, 10], 64, 2),
]


def make_network(case: Case) -> tuple[nn.Sequential, torch.Tensor]:
    """Return a case's network, and a batch of its inputs."""
    torch.manual_seed(1)
    if not case.layers:
        sys.path.insert(0, str(NETWORKS))
        from networks import resnet50

        return resnet50(8, small_images=True), torch.randn(case.batch, 3, 32, 32)
    modules: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(case.layers):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1]), torch.randn(case.batch, case.layers[0])


class Tried(NamedTuple):
    """A layout to try: a mesh, the first piece of the second stage, and the strategies of layers."""

    mesh: Mesh
    begins: str | None
    plan: str | None

    def __str__(self) -> str:
        return " ".join([str(self.mesh), self.begins or "", self.plan or ""]).strip()


def all_layouts(network: nn.Sequential) -> Iterator[Tried]:
    """Yield every layout on two processes."""
    yield Tried(Mesh(data=RANKS), None, None)
    from hostdev.ext.parallel.pieces import get_pieces

    for piece in get_pieces(network)[1:]:
        yield Tried(Mesh(pipe=RANKS), piece.name, None)
    layers = [(name, module) for name, module in network.named_modules() if cuttable(module)]
    ways = [
        [f"{name}={how}" for how in ("colwise", "rowwise") if divides(module, how, RANKS)] for name, module in layers
    ]
    if len(layers) <= _SLICED:
        for each in itertools.product(*([None, *way] for way in ways)):
            plan = ",".join(one for one in each if one)
            if plan:
                yield Tried(Mesh(model=RANKS), None, plan)
        return
    for way in ways:
        for one in way:
            yield Tried(Mesh(model=RANKS), None, one)
    for first in range(2):  # in pairs
        yield Tried(
            Mesh(model=RANKS),
            None,
            ",".join(
                f"{name}={'colwise' if number % 2 == first else 'rowwise'}"
                for number, (name, _) in enumerate(layers)
                if divides(layers[number][1], "colwise" if number % 2 == first else "rowwise", RANKS)
            ),
        )


class Timed:
    """A network in one layout, ready to be timed."""

    def __init__(self, case: Case, tried: Tried, ranks: Ranks) -> None:
        network, self._values = make_network(case)
        ranks.mesh = tried.mesh
        self._labels = torch.arange(case.batch) % 10
        self.network = hostdev.parallel.Network(
            network,
            (self._values[:1],),
            ranks=ranks,
            micro_batches=case.micro_batches,
            stage_cut=tried.begins,
            plan=tried.plan,
        )
        self._adam = torch.optim.Adam(self.network.parameters, fused=True)
        self._ranks, self._mesh = ranks, tried.mesh

    def step(self) -> float:
        """Take a step; return the seconds of the slowest rank."""
        self._ranks.mesh = self._mesh
        self._ranks.control.barrier()
        begin = time.perf_counter()
        self.network.step(
            len(self._values),
            lambda part: (self._values[part],),
            lambda output, part: nn.functional.cross_entropy(output, self._labels[part]),
        )
        self._adam.step()
        self._adam.zero_grad()
        return float(max(self._ranks.control.share(time.perf_counter() - begin)))


def measure(case: Case, ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Return the choice, the times of all layouts, and the choice's time relative to the best."""
    network, values = make_network(case)
    chosen = hostdev.parallel.Network(
        network, (values[:1],), ranks=ranks, micro_batches=case.micro_batches, auto=case.batch
    ).choice
    assert chosen is not None
    if ranks.rank == 0:
        print("\n".join(chosen.lines()), file=sys.stderr, flush=True)
    best = chosen.tried[0]
    plan = ",".join(f"{name}={how}" for name, how in best.plan)
    mine = Tried(best.mesh, ",".join(best.begins) or None, plan or None)
    times: dict[Tried, list[float]] = {}
    for tried in dict.fromkeys([mine, *all_layouts(make_network(case)[0])]):
        timed = Timed(case, tried, ranks)
        timed.step()
        times[tried] = [timed.step() for _ in range(3)]
        del timed
    last = sorted(times, key=lambda tried: min(times[tried]))[:_LAST]
    again = {tried: Timed(case, tried, ranks) for tried in dict.fromkeys([mine, *last])}
    for timed in again.values():
        timed.step()
    found: dict[Tried, list[float]] = {tried: [] for tried in again}
    for _ in range(rounds):
        for tried, timed in again.items():
            found[tried].append(timed.step())
    medians = {tried: statistics.median(each) for tried, each in found.items()}
    fastest = min(medians, key=lambda tried: medians[tried])
    return {
        "network": case.name,
        "layouts": len(times),
        "chosen": str(mine),
        "chosen_ms": round(medians[mine] * 1e3, 2),
        "best": str(fastest),
        "best_ms": round(medians[fastest] * 1e3, 2),
        "over_best": round(medians[mine] / medians[fastest], 4),
        "all_ms": {str(tried): round(min(each) * 1e3, 2) for tried, each in times.items()},
    }


def be_a_rank(rounds: int, number: int) -> None:
    """Measure a case, as one of the two processes."""
    torch.set_num_threads(1)
    with hostdev.join() as ranks:
        assert ranks is not None
        found = measure(CASES[number], ranks, rounds)
        if ranks.rank == 0:
            print(json.dumps(found), flush=True)


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        be_a_rank(arguments.rounds, arguments.case)
        return
    results = []
    for number, case in enumerate(CASES):
        with tempfile.TemporaryFile() as file:
            options = ["--rounds", str(arguments.rounds), "--case", str(number)]
            command = [sys.executable, "-m", "bench", "layouts", *options]
            code = wait_for(start_processes(RANKS, command, stdout=file))
            if code:
                raise SystemExit(f"{case.name}: a process has failed, with exit code {code}")
            file.seek(0)
            found = json.load(file)
        results.append(found)
        met = "met" if found["over_best"] <= MOST else "NOT MET"
        print(
            f"{case.name}: of {found['layouts']} layouts {found['chosen']} was chosen: {found['chosen_ms']} ms a step; "
            f"the best, {found['best']}: {found['best_ms']}; "
            f"{found['over_best']:.3f}x (at most {MOST}: {met})",
            flush=True,
        )
    record("layouts", {"ranks": RANKS, "most": MOST, "cases": results}, arguments.out)
