"""Claims: stages reach 0.85 of the ideal speed and 1.05x torch's bare time; 1F1B's memory does not grow with M.

Each rank has one thread for torch and is bound to one CPU. Two networks run in P = 2 stages with M = 8 micro-batches:
equal layers, and a narrow ResNet-50, which is cut where the measured costs of its pieces balance.

(a) Samples per second of `hostdev.parallel.Network` on two ranks, relative to one: at least 0.85 x M / (M + P - 1) x P.
    One rank is measured with the other CPU idle, and with a second copy running there, because two busy cores share the
    memory's bandwidth, and often the processor's clock.
(b) Step time relative to torch's schedule for the same network, cut, micro-batches, loss and optimizer, written with
    torch.distributed.pipelining alone: at most 1.05x. The same processes run both in turn.
(c) Peak bytes that autograd keeps for the backward pass on stage 0: with 1F1B proportional to the number of stages,
    independent of M. The benchmark also prints all bytes that a step allocates, with gradients and received tensors,
    but without memory that persists between steps, such as torch's own receive buffers.

A step has a forward pass, a backward pass and an update, and is timed from a barrier to the last rank's end. One rank,
two copies of one rank, and two ranks with each schedule take turns; the results are medians, of the ratios too.
"""

import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.parallel_worker import OURS, TORCH, make_network
from bench.record import get_versions, make_parser, record
from bench.team import Team
from hostdev.distributed.rank_environment import start_processes
from hostdev.distributed.world import SCHEDULES
from hostdev.ext.parallel.pieces import balanced, get_pieces

RANKS, MICRO_BATCHES = 2, 8
EFFICIENCY, MOST_OVER_TORCH = 0.85, 1.05
CLAIMED = SCHEDULES[:2]  # the third is measured for information
CLOSE = 1e-4  # allowed difference of the losses: torch adds them in another order
MEMORY_STAGES, MEMORY_COUNTS = (RANKS, 4), (2, 4, 8, 16)  # numbers of stages, numbers of micro-batches
MEMORY_LAYERS, MEMORY_WIDTH, MEMORY_SAMPLES = 4, 128, 256  # layers of a stage, their width, samples of a micro-batch
Times = dict[str, dict[str, list[float]]]  # seconds of steps, by schedule and by implementation


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


def start(ranks: int, copies: int = 1) -> Team:
    """Start the ranks of a pipeline, or independent copies of one rank."""
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes: list[Any] = []
    for copy in range(copies):
        command = [sys.executable, "-m", "bench.parallel_worker", str(copy * ranks)]
        processes += start_processes(ranks, command, **how)
    return Team("bench parallel", processes, ranks)


def choose_stages(case: Case, costs: Sequence[tuple[str, float]], count: int) -> tuple[list[str], list[float]]:
    """Return the first pieces of the second and later stages, and each stage's share of the time."""
    names, seconds = map(list, zip(*costs, strict=True))
    if case.network["kind"] == "layers":
        begins = [names[len(names) * number // count] for number in range(1, count)]
    else:
        begins = balanced(get_pieces(make_network(**case.network)), seconds, count)
    edges = [0, *map(names.index, begins), len(names)]
    return begins, [sum(seconds[start:stop]) / sum(seconds) for start, stop in itertools.pairwise(edges)]


def speed(one: Team, two: Team, case: Case, steps: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Measure a network's steps, (a) and (b) of the claims; print and return the result."""
    each: dict[str, Any] = {"samples": case.batch // MICRO_BATCHES, "repeats": 1 if quick else 5}
    [costs] = one.ask("costs", network=case.network, first=True, **each)
    what: dict[str, Any] = {"network": case.network, "batch": case.batch, "micro_batches": MICRO_BATCHES}
    losses = [first[OURS] for first in one.ask("make", key="", begins=[], schedule="", **what)]
    content: dict[str, Any] = {"network": case.name, "batch": case.batch, "schedules": []}
    for schedule in case.schedules:
        begins, shares = choose_stages(case, costs, RANKS * (1 + (schedule == "interleaved")))
        found = two.ask("make", key=schedule, begins=begins, schedule=schedule, **what)
        if any(first[OURS] != losses[0] for first in found) or abs(found[-1][TORCH] - losses[0]) > CLOSE:
            sys.exit(f"bench parallel: {case.name}: the losses differ: one rank has {losses[0]}, others {found}")
        ranks = [sum(shares[rank::RANKS]) for rank in range(RANKS)]
        row = {"schedule": schedule, "begins": begins, "shares": [round(share, 4) for share in ranks]}
        content["schedules"].append(row)
    turns: dict[str, list[float]] = {"alone": [], "beside": [], **{schedule: [] for schedule in case.schedules}}
    taken: Times = {schedule: {OURS: [], TORCH: []} for schedule in case.schedules}
    for _ in range(rounds):
        [alone] = one.ask("take", key="", steps=steps, first=True)
        turns["alone"].append(statistics.median(alone[OURS]))
        beside = [statistics.median(found[OURS]) for found in one.ask("take", key="", steps=steps)]
        turns["beside"].append(statistics.harmonic_mean(beside))  # corresponds to the mean of both rates
        for schedule in case.schedules:
            come = two.ask("take", key=schedule, steps=steps)
            for who, so_far in taken[schedule].items():
                now = [max(seconds) for seconds in zip(*(found[who] for found in come), strict=True)]
                so_far += now
                if who == OURS:
                    turns[schedule].append(statistics.median(now))
    for team in (one, two):
        team.ask("close")
    return report_speed(case, content, turns, taken, claims=not quick)


def report_speed(
    case: Case, content: dict[str, Any], turns: dict[str, list[float]], taken: Times, *, claims: bool
) -> dict[str, Any]:
    """Print a network's measurements; return them with `content`."""
    goal = EFFICIENCY * MICRO_BATCHES / (MICRO_BATCHES + RANKS - 1) * RANKS
    medians = {name: statistics.median(seconds) for name, seconds in turns.items()}
    print(
        f"\n{case.name}, batch {case.batch:,}: one rank {medians['alone'] * 1e3:,.0f} ms a step, beside another "
        f"{medians['beside'] * 1e3:,.0f} ms"
    )
    print(
        f"{'':<14}{'parts of the time':<20}{'possible':>9}{'two ranks':>12}{'samples/s':>11}{'over one':>10}"
        f"{'over one beside':>17}{'bare torch':>13}{'over it':>9}{'in turn':>9}"
    )
    content |= {"one_ms": _ms(medians["alone"]), "one_beside_ms": _ms(medians["beside"]), "goal": round(goal, 4)}
    for row in content["schedules"]:
        name, shares = row["schedule"], row["shares"]
        ours, theirs = (statistics.median(taken[name][who]) for who in (OURS, TORCH))
        over = {kind: _ratio(turns[kind], turns[name]) for kind in ("alone", "beside")}
        in_turn = _ratio(taken[name][OURS], taken[name][TORCH])
        each_rank = (len(row["begins"]) + 1) // RANKS  # stages
        possible = MICRO_BATCHES / (MICRO_BATCHES * max(shares) + (1 - max(shares)) / each_rank)
        parts = " + ".join(f"{share:.1%}" for share in shares)
        print(
            f"{name:<14}{parts:<20}{possible:>9.2f}{ours * 1e3:>9,.0f} ms{case.batch / ours:>11,.0f}"
            f"{over['alone']:>10.2f}{over['beside']:>17.2f}{theirs * 1e3:>10,.0f} ms{ours / theirs:>9.3f}"
            f"{in_turn:>9.3f}"
        )
        row |= {
            "two_ms": _ms(ours),
            "torch_ms": _ms(theirs),
            "possible": round(possible, 3),
            "over_one": round(over["alone"], 3),
            "over_one_beside": round(over["beside"], 3),
            "over_torch": round(ours / theirs, 3),
            "over_torch_in_turn": round(in_turn, 3),
        }
    for row in content["schedules"]:
        if claims and row["schedule"] in CLAIMED:
            for key, words in (("over_one", "one rank"), ("over_one_beside", "one rank beside another")):
                what = f"{row['schedule']}: {row[key]:.3f} times the samples/s of {words}, at least {goal:.3f}"
                _report(row[key] >= goal, what)
            what = f"{row['schedule']}: {row['over_torch']:.3f} times torch's own step, at most {MOST_OVER_TORCH}"
            _report(row["over_torch"] <= MOST_OVER_TORCH, what)
    return content


def memory(teams: dict[int, Team], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Count a step's bytes, (c) of the claims; print and return a row per number of stages and of micro-batches."""
    print(
        f"\npeak bytes; {MEMORY_LAYERS} x Linear({MEMORY_WIDTH}), ReLU a stage, micro-batches of "
        f"{MEMORY_SAMPLES} samples, {MEMORY_LAYERS * (MEMORY_WIDTH + 1) * MEMORY_WIDTH * 4:,} bytes of parameters"
    )
    print(
        f"{'':<8}{'stages':>7}{'M':>4}{'micro-batches':>14}{'kept on 0':>14}{'torch':>10}{'all on 0':>17}"
        f"{'torch':>13}{'all on last':>17}{'torch':>13}"
    )
    rows = []
    for schedule in CLAIMED:
        for stages, team in teams.items():
            network = {"kind": "layers", "layers": MEMORY_LAYERS * stages, "width": MEMORY_WIDTH}
            begins = [str(2 * MEMORY_LAYERS * number) for number in range(1, stages)]
            for count in (one for one in counts if one >= stages):
                come = team.ask(
                    "memory",
                    network=network,
                    batch=count * MEMORY_SAMPLES,
                    micro_batches=count,
                    schedule=schedule,
                    begins=begins,
                )
                assert not any(found[f"{who} left"] for found in come for who in (OURS, TORCH)), "not all was freed"
                [first, *_, last] = come
                units = first[f"{OURS} saved"] / first["micro-batch"]
                columns = ((first, "saved", 10), (first, "all", 13), (last, "all", 13))
                print(
                    f"{schedule:<8}{stages:>7}{count:>4}{units:>14g}"
                    + "".join(
                        f"{found[f'{who} {key}']:>{width + 4 * (who == OURS)},}"
                        for found, key, width in columns
                        for who in (OURS, TORCH)
                    )
                )
                rows.append(
                    {
                        "schedule": schedule,
                        "stages": stages,
                        "micro_batches": count,
                        "kept": units,
                        "stage_0": first,
                        "last_stage": last,
                    }
                )
    as_stages = all(row["kept"] == row["stages"] for row in rows if row["schedule"] == CLAIMED[0])
    _report(as_stages, f"{CLAIMED[0]}: stage 0 keeps as many micro-batches as there are stages, whatever M")
    return rows


def _ratio(these: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(this / other for this, other in zip(these, others, strict=True))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _report(met: bool, what: str) -> None:
    print(f"{what}: {'met' if met else 'not met'}")


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, help="steps per round (default 2)")
    parser.add_argument("--rounds", type=int, help="number of rounds (default 5)")
    parser.add_argument("--only", choices=("speed", "memory"), help="one part instead of both")
    parser.add_argument("--quick", action="store_true", help="a trial with tiny networks, without claims")
    arguments = parser.parse_args()
    if (os.cpu_count() or 1) < RANKS:
        sys.exit("bench parallel: two ranks need two CPUs")
    content: dict[str, Any] = {"versions": get_versions("torch")}
    content |= {"quick": arguments.quick, "micro_batches": MICRO_BATCHES, "ranks": RANKS}
    quick, two = arguments.quick, start(RANKS)
    one = None if arguments.only == "memory" else start(1, copies=1 if quick else 2)
    if arguments.only in (None, "memory"):
        teams = {stages: two if stages == RANKS else start(stages) for stages in MEMORY_STAGES}
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
    record(name, content, arguments.out)
