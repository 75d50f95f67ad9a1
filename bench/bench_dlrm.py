"""Claim: a DLRM's step on the CPU takes less time than TorchRec's and than `nn.EmbeddingBag` with SparseAdam.

26 tables of 200,000 rows, D = 64; batches of 2,048 and 16,000 with 1 and 10 ids per feature. Every system runs in a
process of its own, and these take turns. A call runs some steps as an epoch of its own, so that opening and closing
a loop counts as hostdev's. A ratio is that of two calls of the same round.
"""

import statistics

from bench.bench_peers import Peer
from bench.record import make_parser, record

SYSTEMS = {
    "torchrec": ("torchrec", "torchrec_dlrm.py", "rowwise"),
    "hostdev, depth 0": ("hostdev", "hostdev_dlrm.py", "rowwise", 0),
    "hostdev, depth 2": ("hostdev", "hostdev_dlrm.py", "rowwise", 2),
    "torch": ("torch", "torch_dlrm.py", "adam"),
    "hostdev, LazyAdam, depth 0": ("hostdev", "hostdev_dlrm.py", "adam", 0),
    "hostdev, LazyAdam, depth 2": ("hostdev", "hostdev_dlrm.py", "adam", 2),
}
RATIOS = [  # the first's time over the second's
    ("torchrec", "hostdev, depth 0"),
    ("torchrec", "hostdev, depth 2"),
    ("hostdev, depth 0", "hostdev, depth 2"),
    ("torch", "hostdev, LazyAdam, depth 0"),
    ("torch", "hostdev, LazyAdam, depth 2"),
]


def measure(rows: int, rounds: int, systems: list[str]) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Run all systems in turn; return milliseconds by case and system, and the versions."""
    peers = {}
    for name in systems:
        environment, script, *arguments = SYSTEMS[name]
        peers[name] = Peer(environment, script, rows, *arguments)
    times: dict[str, dict[str, list[float]]] = {}
    try:
        for turn in range(rounds + 1):  # the first warms up
            for case in next(iter(peers.values())).ops:
                for name, peer in peers.items():
                    ms = peer.run(case)
                    if turn:
                        times.setdefault(case, {}).setdefault(name, []).append(ms)
    finally:
        for peer in peers.values():
            peer.close()
    return times, {key: value for peer in peers.values() for key, value in peer.versions.items()}


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of each table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS, help="default: all")
    arguments = parser.parse_args()
    times, versions = measure(arguments.rows, arguments.rounds, arguments.systems)
    ratios: dict[str, dict[str, list[float]]] = {}
    for case, of in times.items():
        batch, count = case.split()
        print(f"\nbatch {batch}, {count} ids per feature")
        for name, each in of.items():
            print(f"  {name:<40}{statistics.median(each):>10.1f} ms  ({min(each):.1f} to {max(each):.1f})")
        for ours, theirs in RATIOS:
            if ours in of and theirs in of:
                found = sorted(a / b for a, b in zip(of[ours], of[theirs], strict=True))
                ratios.setdefault(case, {})[f"{ours} / {theirs}"] = [round(ratio, 3) for ratio in found]
                name = f"{ours} / {theirs}"
                print(f"  {name:<48}{statistics.median(found):>6.2f}  ({found[0]:.2f} to {found[-1]:.2f})")
    record("dlrm", {"versions": versions, "ms": times, "ratios": ratios}, arguments.out)


if __name__ == "__main__":
    main()
