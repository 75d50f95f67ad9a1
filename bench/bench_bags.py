"""Claim: lookup, pooling and update of bags take at most 1 / 1.15 of the time of FBGEMM's CPU kernels.

A table of 1,000,000 rows with D columns, row-wise Adagrad; 160,000 ids in bags of one size, uniform or Zipf. A step of
hostdev is one of a `Runtime` loop at depth 0: it deduplicates the ids, looks rows up, pools them, sums the gradients
and updates the rows. FBGEMM's is a forward and a backward pass of its table. Each runs in a process of its own, and
they take turns, call by call. A ratio is FBGEMM's time divided by hostdev's in the same turn; the table shows the
median of a run's turns, for each run.
"""

import statistics

from bench.bench_peers import Peer
from bench.record import make_parser, record
from bench.workload import BAG_CASES

SCRIPTS = {"hostdev": ("hostdev", "hostdev_bags.py"), "FBGEMM": ("torch", "fbgemm_bags.py")}
LIMIT = 1.15
WARM_UP = 2


def measure(rows: int, turns: int, cases: list[str]) -> dict[str, dict[str, list[float]]]:
    """Run both systems in turn, in processes of their own; return milliseconds by case and system."""
    peers = {name: Peer(*script, rows, *cases) for name, script in SCRIPTS.items()}
    times: dict[str, dict[str, list[float]]] = {case: {name: [] for name in peers} for case in cases}
    try:
        for case in cases:
            for turn in range(WARM_UP + turns):
                for name, peer in peers.items():
                    ms = peer.run(case)
                    if turn >= WARM_UP:
                        times[case][name].append(ms)
    finally:
        for peer in peers.values():
            peer.close()
    return times


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=7, help="each with new processes")
    parser.add_argument("--turns", type=int, default=9, help="of each case in a run")
    parser.add_argument("--cases", nargs="*", default=BAG_CASES, choices=BAG_CASES, help="D, bag and ids; default: all")
    arguments = parser.parse_args()
    runs = [measure(arguments.rows, arguments.turns, arguments.cases) for _ in range(arguments.runs)]
    print(f"{'D bag ids':<18}{'hostdev ms':>12}{'FBGEMM ms':>12}   FBGEMM / hostdev, by run")
    results = {}
    for case in arguments.cases:
        ours, theirs = ([statistics.median(run[case][name]) for run in runs] for name in SCRIPTS)
        ratios = [
            statistics.median(b / a for a, b in zip(*(run[case][name] for name in SCRIPTS), strict=True))
            for run in runs
        ]
        met = "" if min(ratios) >= LIMIT else f"  below {LIMIT}"
        text = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{case:<18}{statistics.median(ours):>12.2f}{statistics.median(theirs):>12.2f}   {text}{met}", flush=True)
        results[case] = {
            "hostdev_ms": [round(ms, 3) for ms in ours],
            "fbgemm_ms": [round(ms, 3) for ms in theirs],
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    record("bags", {"limit": LIMIT, "results": results}, arguments.out)


if __name__ == "__main__":
    main()
