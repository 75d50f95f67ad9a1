"""Claim: DeepFM and DCN-v2 reach RecBole's and FuxiCTR's AUC on the same split at 1.5 times their samples a second.

RecBole trains with its own configuration on its ml-100k and writes its split. FuxiCTR trains with its default settings
on Criteo's text, of which the last tenth is for testing. hostdev then trains the same network on the same rows, for the
same epochs, on the CPU. Each system runs in a process of its own, one after the other.
"""

import argparse
import csv
import json
import math
import statistics
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

from bench.bench_peers import ROOT, find_python
from bench.record import make_parser, record

NUMERIC, CATEGORICAL = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
FILMS = ["--categorical", "user_id,item_id,age,gender,occupation,release_year", "--bag", "class= "]
CRITEO = ["--numeric", ",".join(NUMERIC), "--categorical", ",".join(CATEGORICAL), "--threshold", "2"]
FUXI = {"DeepFM": {"dim": 10, "layers": [64] * 3}, "DCNv2": {"dim": 40, "layers": [500] * 3}}


def run(environment: str, script: str, *arguments: object) -> dict[str, Any]:
    """Run a system's script; return what it prints."""
    command = [find_python(environment), str(ROOT / "bench/peers" / script), *map(str, arguments)]
    env = {"PYTHONPATH": str(ROOT)} if environment == "hostdev" else {}
    done = subprocess.run(["env", *(f"{k}={v}" for k, v in env.items()), *command], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{environment}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def against_recbole(name: str, epochs: int, folder: Path) -> dict[str, Any]:
    """Train RecBole's model and ours on its split of ml-100k."""
    theirs = run("recbole", "recbole_ctr.py", name, epochs, folder)
    given = theirs["config"]
    options: dict[str, Any] = {"layers": given["mlp_hidden_size"]}
    if name == "DeepFM":
        options["dropout"] = given["dropout_prob"]
    else:
        options |= {"cross_layers": given["cross_layer_num"], "rank": None}
    config = {
        "roles": ["--label", "label", "--threshold", "0", *FILMS],
        "learning_rate": given["learning_rate"],
        "batch_size": given["train_batch_size"],
        "dim": given["embedding_size"],
        "options": options,
    }
    ours = run("hostdev", "hostdev_ctr.py", {"DCNV2": "dcn"}.get(name, "deepfm"), epochs, folder, json.dumps(config))
    return {"recbole": theirs, "hostdev": ours}


def against_fuxictr(name: str, epochs: int, folder: Path) -> dict[str, Any]:
    """Train FuxiCTR's model and ours on a split of Criteo's text."""
    columns = {"numeric": NUMERIC, "categorical": CATEGORICAL, "threshold": 2}
    theirs = run("fuxictr", "fuxictr_ctr.py", name, epochs, folder, json.dumps(columns))
    options: dict[str, Any] = {"layers": FUXI[name]["layers"]}
    if name == "DCNv2":
        options |= {"cross_layers": 3, "rank": None, "structure": "parallel"}
    config = {
        "roles": ["--label", "label", *CRITEO],
        "learning_rate": 1e-3,
        "batch_size": 2048,
        "dim": FUXI[name]["dim"],
        "options": options,
    }
    ours = run("hostdev", "hostdev_ctr.py", {"DCNv2": "dcn"}.get(name, "deepfm"), epochs, folder, json.dumps(config))
    return {"fuxictr": theirs, "hostdev": ours}


def write_split(criteo: Path, folder: Path) -> None:
    """Write Criteo's text as train.csv and test.csv, numbers as log(1 + x); the last tenth is for testing."""
    with criteo.open(encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    cut = len(rows) * 9 // 10
    for name, part in (("train", rows[:cut]), ("test", rows[cut:])):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["label", *NUMERIC, *CATEGORICAL])
            for row in part:
                numbers = (f"{math.log1p(max(0, int(text))):.5f}" if text else "" for text in row[1:14])
                writer.writerow(chain(row[:1], numbers, row[14:]))


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--criteo", type=Path, help="Criteo's text for FuxiCTR; without it, only RecBole is compared")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("recbole", "fuxictr"))
    arguments = parser.parse_args()
    cases = [(against_recbole, name) for name in ("DeepFM", "DCNV2") if arguments.only != "fuxictr"]
    if arguments.criteo is not None:
        cases += [(against_fuxictr, name) for name in ("DeepFM", "DCNv2") if arguments.only != "recbole"]
    elif arguments.only != "recbole":
        print("FuxiCTR is left out, because --criteo is not given", file=sys.stderr)
    results: dict[str, Any] = {}
    for compare, name in cases:
        _compare(compare, name, arguments, results)
    record("ctr", results, arguments.out)


def _compare(compare: Any, name: str, arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run a case's rounds, print the medians, and add them to the results."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if compare is against_fuxictr:
            write_split(arguments.criteo, folder)
        found = [compare(name, arguments.epochs, folder) for _ in range(arguments.rounds)]
    peer = next(iter(found[0]))
    ratios = [one["hostdev"]["samples_per_second"] / one[peer]["samples_per_second"] for one in found]
    auc = {system: statistics.median(one[system]["auc"] for one in found) for system in (peer, "hostdev")}
    speed = {system: statistics.median(one[system]["samples_per_second"] for one in found) for system in auc}
    print(f"{name}: AUC {peer} {auc[peer]:.4f}, hostdev {auc['hostdev']:.4f}", end="   ", flush=True)
    print(
        f"samples/s {speed[peer]:,.0f} and {speed['hostdev']:,.0f}, "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    results[f"{peer} {name}"] = {"rounds": found, "auc": auc, "samples_per_second": speed, "ratios": ratios}


if __name__ == "__main__":
    main()
