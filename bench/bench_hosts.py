"""Claim: two hosts of two ranks send at most as many bytes in two levels as in one, in fewer packets.

Each host is a network namespace of this one, and the link between them has a delay of 0.5 ms and a rate of 1 Gbit/s
(bench/link.py). Two trainings of Wide & Deep with four ranks take turns. In one of them each rank exchanges with each
other one. In the other, ranks of a host share memory, and one rank of each host exchanges with the other host. Both do
the same work, with the same bits. The benchmark prints a step's time, the bytes for other hosts that the ranks count,
and the bytes and packets on the link; and for collectives alone, the time of an empty one.

Nothing is claimed about the time of a step: with two ranks on each host, one level sends its two messages to the other
host at the same time, and all ranks, and the thread that forwards the packets, share this machine's CPUs. The benchmark
needs Linux, root and iproute2.
"""

import os
import statistics
import subprocess
import sys
from typing import Any

from bench.link import Link
from bench.ranks_worker import LEVELS
from bench.record import get_versions, make_parser, record
from bench.team import Team

HOSTS, EACH, PORT = 2, 2, 29500
DELAY, RATE = 0.5e-3, 1e9 / 8  # seconds; bytes per second
SIZES = ((16, [256, 128]), (80, [1024, 512, 256, 128]))  # D and the widths of the dense layers
DEPTH, MICRO_BATCHES = 2, 4
COUNT = 1 << 20  # values for each rank in a collective that is timed


def start(link: Link, levels: int) -> Team:
    """Start a training's ranks on both hosts."""
    processes: list[Any] = []
    for rank in range(HOSTS * EACH):
        place = {
            "RANK": rank,
            "WORLD_SIZE": HOSTS * EACH,
            "LOCAL_RANK": rank % EACH,
            "LOCAL_WORLD_SIZE": EACH,
            "MASTER_ADDR": link.addresses[0],
            "MASTER_PORT": PORT + levels,
            LEVELS: levels,
        }
        processes.append(
            subprocess.Popen(
                [*link.inside(rank // EACH), sys.executable, "-m", "bench.ranks_worker"],
                env={**os.environ, **{name: str(value) for name, value in place.items()}},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    return Team("bench hosts", processes, HOSTS * EACH)


def collectives(teams: dict[int, Team], rounds: int) -> list[dict[str, Any]]:
    """Measure collectives alone; print and return a row for each number of levels."""
    print(f"{'collectives':<14}{'empty':>12}{'between hosts':>16}")
    found: dict[int, list[dict[str, float]]] = {levels: [] for levels in teams}
    for _ in range(rounds):
        for levels, team in teams.items():
            found[levels].append(team.ask("links", rounds=1, count=COUNT)[0])
    rows = []
    for levels, each in found.items():
        seconds, rate = (statistics.median(one[key] for one in each) for key in ("seconds", "bytes_per_s"))
        # A rank sends as much to each other rank, so that this share of its bytes leaves the host.
        rate *= EACH * (HOSTS - 1) * EACH / (HOSTS * EACH - 1)
        print(f"{_name(levels):<14}{seconds * 1e6:>9.0f} us{rate / 1e6:>11.0f} MB/s")
        rows.append({"levels": levels, "empty_us": round(seconds * 1e6, 1), "host_bytes_per_s": round(rate)})
    return rows


def train(link: Link, teams: dict[int, Team], rows: int, batch: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Measure training steps; print and return a row for each size and number of levels."""
    print(
        f"\n{'training':<28}{'step':>10}{'over one level':>16}{'to other hosts':>16}{'on the link':>13}{'packets':>10}"
    )
    found = []
    for dim, layers in SIZES:
        what = {"rows": rows, "dim": dim, "batch": batch, "layers": layers, "depth": DEPTH}
        for team in teams.values():
            team.ask("training", **what, micro_batches=MICRO_BATCHES)
            team.most("take", steps=1)
        turns: dict[int, list[dict[str, float]]] = {levels: [] for levels in teams}
        for _ in range(rounds):
            for levels, team in teams.items():
                turns[levels].append(_measure(link, team, steps))
        for team in teams.values():
            team.ask("close")
        for levels, each in turns.items():
            row = {key: statistics.median(one[key] for one in each) for key in each[0]}
            ratio = statistics.median(
                mine["seconds"] / other["seconds"] for mine, other in zip(each, turns[1], strict=True)
            )
            print(
                f"D = {dim}, {_name(levels)}".ljust(28)
                + f"{row['seconds'] * 1e3:>7.0f} ms{ratio:>16.2f}{row['network'] / 1e6:>13.2f} MB"
                + f"{row['bytes'] / 1e6:>10.2f} MB{row['packets']:>10.0f}"
            )
            found.append(
                {
                    "dim": dim,
                    "layers": layers,
                    "levels": levels,
                    "step_ms": round(row["seconds"] * 1e3, 2),
                    "over_one_level": round(ratio, 3),
                    "network_bytes": round(row["network"]),
                    "link_bytes": round(row["bytes"]),
                    "link_packets": round(row["packets"]),
                }
            )
    one, two = ([row for row in found if row["levels"] == levels] for levels in (1, 2))
    pairs = list(zip(one, two, strict=True))
    bytes_ratio, packets_ratio = (max(b[key] / a[key] for a, b in pairs) for key in ("network_bytes", "link_packets"))
    met = "met" if bytes_ratio <= 1 and packets_ratio < 1 else "not met"
    print(f"at most {bytes_ratio:.2f} times the bytes and {packets_ratio:.2f} times the packets of one level: {met}")
    return found


def _measure(link: Link, team: Team, steps: int) -> dict[str, float]:
    """Return a step's seconds, the bytes that all ranks send to other hosts, and what crosses the link."""
    before, crossed = team.ask("sent"), link.sent
    seconds = team.most("take", steps=steps)
    after, now = team.ask("sent"), link.sent
    taken = after[0]["steps"] - before[0]["steps"]
    network = sum(b["network"] - a["network"] for a, b in zip(before, after, strict=True))
    return {
        "seconds": seconds,
        "network": network / taken,
        "packets": (now.packets - crossed.packets) / taken,
        "bytes": (now.bytes - crossed.bytes) / taken,
    }


def _name(levels: int) -> str:
    return "two levels" if levels == 2 else "one level"


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the tables")
    parser.add_argument("--batch-size", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with Link("hosts", DELAY, RATE) as link:
        teams = {levels: start(link, levels) for levels in (1, 2)}
        alone = collectives(teams, 4 * arguments.rounds)
        steps = train(link, teams, arguments.rows, arguments.batch_size, arguments.steps, arguments.rounds)
        for team in teams.values():
            team.close()
    shape = {"hosts": HOSTS, "ranks_per_host": EACH, "delay_us": DELAY * 1e6, "bits_per_s": RATE * 8}
    content = {"versions": get_versions("numba", "torch"), "link": shape, "collectives": alone, "training": steps}
    record("hosts", content, arguments.out)
