"""Compare the host side of a step, and a whole step on the CPU, with MindSpore, torch and FBGEMM on the same work.

Every system runs in a process of its own. The ops take turns, and medians are compared, because the machine's bandwidth
drifts. The first run installs the peers' environments in .peers/ (4 GB).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path

from bench import pins
from bench.record import make_parser, record

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".peers"
COMPUTE_ROWS = 184_965


def find_python(name: str) -> str:
    """Return the Python of a peer's environment, which is installed if it does not exist or has other pins."""
    if name == "hostdev":
        return sys.executable
    folder = ENVIRONMENTS / name
    ready, wanted = folder / ".ready", pins.path_of(name).read_text()
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {name} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        for command in pins.install_commands(name, folder / "bin/python"):
            subprocess.run(command, check=True)
        ready.write_text(wanted)
    return str(folder / "bin/python")


class Peer:
    """A peer's process, which answers one call at a time."""

    def __init__(self, environment: str, script: str, *arguments: object) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)} if environment == "hostdev" else dict(os.environ)
        self._process = subprocess.Popen(
            [find_python(environment), str(ROOT / "bench/peers" / script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        hello = self._answer()
        self.ops, self.versions = hello["ops"], hello["versions"]

    def run(self, op: str) -> float:
        """Call an op once; return its milliseconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(op + "\n")
        self._process.stdin.flush()
        return float(self._answer()["ms"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self._process.args} ended without an answer")


def medians(scripts: dict[str, str], rows: int, rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """Run all ops of some peers in turn; return the median milliseconds by "peer: op", and the versions."""
    peers = {name: Peer(name, script, rows) for name, script in scripts.items()}
    times: dict[str, list[float]] = {}
    try:
        for turn in range(rounds + 2):  # the first two warm up
            for name, peer in peers.items():
                for op in peer.ops:
                    ms = peer.run(op)
                    if turn >= 2:
                        times.setdefault(f"{name}: {op}", []).append(ms)
    finally:
        for peer in peers.values():
            peer.close()
    versions = {key: value for peer in peers.values() for key, value in peer.versions.items()}
    return {op: statistics.median(values) for op, values in times.items()}, versions


def kernel_ratios(ms: dict[str, float], unique: int) -> list[tuple[str, float, str]]:
    """Return the name, value and unit of every comparison of kernels."""
    reference = sum(ms[f"mindspore: {op}"] for op in ("lookup deep", "lookup wide", "ftrl", "lazy adam"))
    copy = 0.4 / ms["hostdev: copy 400 MB"]  # GB per ms, read and written
    adam = unique * 80 * 4 * 7 / 1e9 / ms["hostdev: lazy adam unique"]
    rows = [
        ("host side of a step / MindSpore's", reference / ms["hostdev: host side"], "x"),
        ("apply, LazyAdam, all / MindSpore's", ms["mindspore: lazy adam"] / ms["hostdev: lazy adam all"], "x"),
        ("apply, LazyAdam, all / torch SparseAdam", ms["torch: sparse adam"] / ms["hostdev: lazy adam all"], "x"),
        ("apply, FTRL D = 1, all / MindSpore's", ms["mindspore: ftrl"] / ms["hostdev: ftrl all"], "x"),
        ("lookup, all / torch index_select", ms["torch: index_select"] / ms["hostdev: lookup all"], "x"),
        ("LazyAdam, unique: bytes / copy bandwidth", 100 * adam / copy, "%"),
    ]
    for name in ("adagrad", "row-wise adagrad"):
        forward, whole = f"torch: fbgemm forward {name}", f"torch: fbgemm forward, backward, {name}"
        if whole in ms:
            ours = ms["hostdev: lazy adam all"]
            rows.append((f"apply, LazyAdam / FBGEMM {name} backward", (ms[whole] - ms[forward]) / ours, "x"))
    return rows


def step_ratios(ms: dict[str, float]) -> list[tuple[str, float, str]]:
    """Return the name, value and unit of every comparison of whole steps on the CPU."""
    rows = []
    for batch in (4000, 16000):
        for precision in ("fp32", "bf16"):
            ours = ms[f"hostdev: step {precision} {batch}"]
            rows += [
                (f"batch {batch} {precision}: samples/s", batch / ours * 1e3, ""),
                (
                    f"batch {batch} {precision}: step / dense part",
                    ours / ms[f"hostdev: dense {precision} {batch}"],
                    "x",
                ),
                (f"batch {batch} {precision}: MindSpore fp32 / ours", ms[f"mindspore: step {batch}"] / ours, "x"),
                (f"batch {batch} {precision}: torch SparseAdam fp32 / ours", ms[f"torch: step {batch}"] / ours, "x"),
            ]
    return rows


def show(title: str, ms: dict[str, float], ratios: list[tuple[str, float, str]]) -> None:
    """Print a table of medians and one of ratios."""
    print(f"\n{title}\n")
    for op, value in ms.items():
        print(f"  {op:<50}{value:>12.2f} ms")
    print()
    for name, value, unit in ratios:
        print(f"  {name:<55}{value:>12,.2f} {unit}")


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[184_965, 5_000_000], help="table sizes for the kernels")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction, default=True, help="also time whole steps")
    arguments = parser.parse_args()
    results = {}
    kinds = {"kernels": arguments.rows, "steps": [COMPUTE_ROWS] if arguments.steps else []}
    for kind, sizes in kinds.items():
        part = "ops" if kind == "kernels" else "train"
        for rows in sizes:
            scripts = {name: f"{name}_{part}.py" for name in ("hostdev", "mindspore", "torch")}
            rounds = arguments.rounds if kind == "kernels" else max(3, arguments.rounds // 2)
            ms, versions = medians(scripts, rows, rounds)
            ratios = kernel_ratios(ms, int(versions["unique"])) if kind == "kernels" else step_ratios(ms)
            show(f"{kind}, V = {rows:,}, {rounds} rounds", ms, ratios)
            results[f"{kind} {rows}"] = {
                "versions": versions,
                "median_ms": {op: round(value, 3) for op, value in ms.items()},
                "ratios": {name: round(value, 3) for name, value, _ in ratios},
            }
    record("peers", {"results": results}, arguments.out)
