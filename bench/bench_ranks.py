"""Claims: two ranks of one core train at 1.6x the samples/s of one; the tree's exchange costs at most 1.2x DDP's.

Each rank has one thread for kernels and one for torch, and is bound to one CPU. One rank and two ranks take turns with
the same micro-batches; the results are medians, of the ratios too. They train Wide & Deep, in full size and smaller,
on ids like Criteo's. The benchmark prints the exchanged bytes relative to the least possible.

The exchange of dense gradients along the summation tree is compared with a backward pass under torch's
DistributedDataParallel, which exchanges the same gradients, and with plain all-reduces of the same number of bytes.

With a simulated device, which waits and then exchanges its gradients, the benchmark compares a step at depth 2 with
the longer of host and device, each with its exchange: at most 1.15x. Here a rank's one core does both exchanges, so the
benchmark also prints the ratio to the longer of the device's time and that core's.
"""

import itertools
import os
import socket
import statistics
import subprocess
import sys
from typing import Any

from bench.ranks_worker import ALONE_WITH_RANKS, FIRST_CPU
from bench.record import get_versions, make_parser, record
from bench.scaling import Work, dense_seconds, fitted, host_seconds
from bench.team import Team
from bench.wide_deep import FIELDS
from hostdev.distributed.rank_environment import start_processes

SIZES = ((80, None), (16, [256, 128]))  # D and the widths of the dense layers; None: full size
FULL_LAYERS = [1024, 512, 256, 128]
FACTORS = (0.5, 1.0, 2.0)  # the device's time over the host's
DEPTH, MICRO_BATCHES = 2, 4
FORMULA_ROWS = 1_000_000  # at most; steps do not overlap there, so batches may share rows
LEAST_SPEEDUP, MOST_OVER_LARGER, MOST_OVER_DDP, MOST_OFF = 1.6, 1.15, 1.2, 0.2


def start(ranks: int, copies: int = 1, *, with_itself: bool = False) -> Team:
    """Start the ranks of a training, or independent copies of it.

    Args:
        ranks: Number of ranks of a training.
        copies: Number of trainings.
        with_itself: Whether a single rank exchanges with itself.
    """
    command = [sys.executable, "-m", "bench.ranks_worker"]
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes: list[Any] = []
    for copy in range(copies):
        os.environ[FIRST_CPU] = str(copy * ranks)
        if with_itself:
            os.environ[ALONE_WITH_RANKS] = _free_port()
        processes += start_processes(ranks, command, **how)
        os.environ.pop(ALONE_WITH_RANKS, None)
    del os.environ[FIRST_CPU]
    return Team("bench ranks", processes, ranks)


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def train(one: Team, two: Team, rows: int, batches: list[int], steps: int, rounds: int) -> list[dict[str, Any]]:
    """Measure training of one rank and of two; print and return a row per setting."""
    print(f"\n{'training':<34}{'one rank':>12}{'two ranks':>12}{'samples/s':>12}{'two / one':>11}{'bytes / least':>15}")
    found = []
    for dim, layers in SIZES:
        for batch in batches:
            what = {"rows": rows, "dim": dim, "batch": batch, "layers": layers, "depth": DEPTH}
            for team in (one, two):
                team.ask("training", **what, micro_batches=MICRO_BATCHES)
            before, turns = two.ask("sent"), []
            for _ in range(rounds):
                turns.append((one.most("take", steps=steps), two.most("take", steps=steps)))
            after = two.ask("sent")
            for team in (one, two):
                team.ask("close")
            sent = {key: sum(b[key] - a[key] for a, b in zip(before, after, strict=True)) for key in after[0]}
            alone, together = (statistics.median(each) for each in zip(*turns, strict=True))
            ratio = statistics.median(first / second for first, second in turns)
            over = sent["rows"] / sent["least"]
            print(
                f"D = {dim}, {'full' if layers is None else layers}, batch {batch:,}".ljust(34)
                + f"{alone * 1e3:>9.0f} ms{together * 1e3:>9.0f} ms{batch / together:>12,.0f}{ratio:>11.2f}"
                + f"{over:>15.4f}"
            )
            found.append(
                {
                    "dim": dim,
                    "layers": layers or "full",
                    "batch": batch,
                    "one_ms": round(alone * 1e3, 2),
                    "two_ms": round(together * 1e3, 2),
                    "speedup": round(ratio, 3),
                    "bytes_over_least": round(over, 5),
                }
            )
    least = min(row["speedup"] for row in found if row["layers"] == "full")
    met = "met" if least >= LEAST_SPEEDUP else "not met"
    print(f"full size: {least:.2f} times the samples/s of one rank, at least {LEAST_SPEEDUP}: {met}")
    return found


def overlap(two: Team, rows: int, batches: list[int], steps: int, rounds: int) -> list[dict[str, Any]]:
    """Measure steps on a simulated device; print and return a row per setting."""
    dim = SIZES[0][0]
    print(
        f"\n{'simulated device':<26}{'device/host':>12}{'host':>11}{'device':>11}{'core part':>12}{'step':>11}"
        f"{'over the larger':>17}{'over the core':>15}"
    )
    found = []
    for kind in ("uniform", "Zipf"):
        for batch in batches:
            two.ask("pipeline", rows=rows, dim=dim, batch=batch, kind=kind, depths=[0, DEPTH], layers=FULL_LAYERS)
            turns: dict[float, list[tuple[float, float, float, float]]] = {factor: [] for factor in FACTORS}
            for _ in range(rounds):
                for factor in FACTORS:
                    host = two.most("pipeline_steps", depth=0, steps=steps, seconds=0.0, dense=False)
                    exchange = two.most("dense_steps", steps=steps)
                    wait = max(host * factor - exchange, 0.0)
                    step = two.most("pipeline_steps", depth=DEPTH, steps=steps, seconds=wait, dense=True)
                    turns[factor].append((host, wait + exchange, exchange, step))
            two.ask("close")
            for factor, each in turns.items():
                host, device, core, step = (statistics.median(column) for column in zip(*each, strict=True))
                over = statistics.median(step / max(host, device) for host, device, _, step in each)
                over_core = statistics.median(step / max(host + core, device) for host, device, core, step in each)
                print(
                    f"{kind + f' ids, batch {batch:,}':<26}{factor:>12}{host * 1e3:>8.1f} ms{device * 1e3:>8.1f} ms"
                    f"{core * 1e3:>9.1f} ms{step * 1e3:>8.1f} ms{over:>17.2f}{over_core:>15.2f}"
                )
                found.append(
                    {
                        "ids": kind,
                        "batch": batch,
                        "device_over_host": factor,
                        "host_ms": round(host * 1e3, 2),
                        "device_ms": round(device * 1e3, 2),
                        "step_ms": round(step * 1e3, 2),
                        "exchange_ms": round(core * 1e3, 2),
                        "over_larger": round(over, 3),
                        "over_core": round(over_core, 3),
                    }
                )
    for kind in ("uniform", "Zipf"):
        most = max(row["over_larger"] for row in found if row["ids"] == kind)
        met = "met" if most <= MOST_OVER_LARGER else "not met"
        print(f"{kind} ids: at most {most:.2f} times the larger, {MOST_OVER_LARGER} claimed: {met}")
    return found


def trees(two: Team, rounds: int) -> list[dict[str, Any]]:
    """Measure the exchange of dense gradients; print and return a row per setting."""
    print(
        f"\n{'dense gradients':<34}{'tree':>10}{'DDP':>10}{'tree / DDP':>12}{'all-reduce alone':>18}"
        f"{'backward alone':>16}"
    )
    found = []
    for dim, layers in ((16, [256, 128]), (80, FULL_LAYERS)):
        for micro_batches in (2, 4):
            [one, *_] = two.ask("trees", dim=dim, layers=layers, micro_batches=micro_batches, rounds=rounds)
            name = f"{one['bytes'] / 1e6:.1f} MB, {micro_batches} micro-batches"
            print(
                f"{name:<34}"
                + "".join(f"{one[key] * 1e3:>7.2f} ms" for key in ("tree", "ddp"))
                + f"{one['tree / ddp']:>12.2f}{one['all_reduce'] * 1e3:>15.2f} ms{one['backward'] * 1e3:>13.2f} ms"
            )
            found.append(
                {
                    "bytes": one["bytes"],
                    "micro_batches": micro_batches,
                    "over_ddp": round(one["tree / ddp"], 3),
                    **{f"{key}_ms": round(one[key] * 1e3, 3) for key in ("tree", "ddp", "all_reduce", "backward")},
                }
            )
    most = max(row["over_ddp"] for row in found if row["micro_batches"] == 2)
    met = "met" if most <= MOST_OVER_DDP else "not met"
    print(f"one micro-batch per rank, as in DDP: {most:.2f} times DDP's time, at most {MOST_OVER_DDP}: {met}")
    return found


def formula(two: Team, rows: int, batches: list[int], steps: int, rounds: int) -> dict[str, Any]:
    """Fit the formula's constants to single ranks, and compare the formula with two ranks; print and return both.

    Two single ranks run at a time, because the ranks of a host share its memory. The host's part is a step at depth 0
    without a device; the dense part is an exchange of dense gradients.
    """
    link, copied = two.ask("links", rounds=4 * rounds)[0], two.most("copying", rounds=rounds)

    def measured(team: Team, kind: str, batch: int, dim: int, layers: list[int]) -> tuple[Work, float, float]:
        team.ask("pipeline", rows=rows, dim=dim, batch=batch, kind=kind, depths=[0], layers=layers)
        how = {"depth": 0, "steps": steps, "seconds": 0.0, "dense": False}
        host = statistics.median(team.most("pipeline_steps", **how) for _ in range(rounds))
        dense = statistics.median(team.most("dense_steps", steps=steps) for _ in range(rounds))
        shape = {key: statistics.mean(each[key] for each in team.ask("shape")) for key in ("ids", "asked", "owned")}
        sizes = [FIELDS * dim, *layers, 1]
        parameters = sum(first * second + second for first, second in itertools.pairwise(sizes))
        team.ask("close")
        return Work(**shape, columns=dim + 1, ranks=team.ranks, parameters=parameters), host, dense

    cases = [(kind, batch, dim) for kind in ("uniform", "Zipf") for batch in batches for dim in (16, 80)]
    one = start(1, copies=2)
    alone = [measured(one, *case, [128])[:2] for case in cases]
    one.close()
    with_itself = start(1, copies=2, with_itself=True)
    alone = [(*point, measured(with_itself, *case, [128])[1]) for point, case in zip(alone, cases, strict=True)]
    with_itself.close()
    machine = fitted(alone, copied, 1 / link["bytes_per_s"], link["seconds"])
    print(f"\n{'formula':<32}{'host ms':>9}{'formula':>9}{'off':>7}{'dense exchange ms':>20}{'formula':>9}{'off':>7}")
    found = []
    for kind, batch, dim in cases:
        work, host, dense = measured(two, kind, batch, dim, FULL_LAYERS)
        says, says_dense = host_seconds(work, machine), dense_seconds(work, machine, 0.0)
        off, off_dense = says / host - 1, says_dense / dense - 1
        print(
            f"{kind} ids, batch {batch:,}, D = {dim}".ljust(32)
            + f"{host * 1e3:>9.1f}{says * 1e3:>9.1f}{off:>+7.0%}{dense * 1e3:>20.1f}{says_dense * 1e3:>9.1f}"
            + f"{off_dense:>+7.0%}"
        )
        found.append(
            {
                "ids": kind,
                "batch": batch,
                "dim": dim,
                "host_ms": round(host * 1e3, 2),
                "says_ms": round(says * 1e3, 2),
                "off": round(off, 3),
                "dense_ms": round(dense * 1e3, 2),
                "dense_says_ms": round(says_dense * 1e3, 2),
                "dense_off": round(off_dense, 3),
            }
        )
    most = max(abs(row[key]) for row in found for key in ("off", "dense_off"))
    met = "met" if most <= MOST_OFF else "not met"
    print(f"the formula is off by at most {most:.0%}, {MOST_OFF:.0%} claimed: {met}")
    return {"machine": machine._asdict(), "points": found}


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the tables")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[4000, 16_000])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("training", "overlap", "trees", "formula"), help="one part instead of all")
    arguments = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        sys.exit("bench ranks: two ranks need two CPUs")
    content: dict[str, Any] = {}
    two, how = start(2), (arguments.rows, arguments.batch_sizes)
    if arguments.only in (None, "trees"):
        content["trees"] = trees(two, 4 * arguments.rounds)
    if arguments.only in (None, "overlap"):
        content["overlap"] = overlap(two, *how, 3 * arguments.steps, arguments.rounds)
    if arguments.only in (None, "formula"):
        content["formula"] = formula(
            two, min(arguments.rows, FORMULA_ROWS), arguments.batch_sizes, 2 * arguments.steps, arguments.rounds
        )
    if arguments.only in (None, "training"):
        one = start(1)
        content["training"] = train(one, two, *how, arguments.steps, arguments.rounds)
        one.close()
    two.close()
    versions = get_versions("numba", "torch")
    content = {"versions": versions, "micro_batches": MICRO_BATCHES, **content}
    record("ranks", content, arguments.out)
