"""Claim: training on data in a store, over a link of 100 MB/s, has at least 0.95 of the samples/s of local data.

An S3 server in a process of its own answers at most that fast. Copies on this machine may take four shards, so that all
data comes over the link in every epoch. The server shares the processors of this machine, which counts against the
store. Runs take turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.record import make_parser, record

ROUNDS = 3
SECRETS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_DEFAULT_REGION": "us-east-1"}
_PUT = "import sys, s3fs; s = s3fs.S3FileSystem(); s.mkdir('bench'); s.put(sys.argv[1], 'bench/', recursive=True)"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=100e6, help="bytes/s of the link")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.rows, options.batch_size, options.rate, options.rounds)
    given = {"rows": options.rows, "batch_size": options.batch_size, "rate": options.rate}
    record("stores", {**given, **result}, options.out)


def measure(folder: Path, rows: int, batch_size: int, rate: float, rounds: int) -> dict[str, Any]:
    """Return samples/s of local data and of data in a store, by round, and the median ratio."""
    per_shard = max(1, rows // 20)
    make = ["synthetic", "--rows", rows, "--hash-buckets", rows // 4, "--rows-per-shard", per_shard, "--out", "data"]
    _call("hostdev.data.preprocess", *make, folder=folder)
    shard = max(each.stat().st_size for each in (folder / "data/train").iterdir())
    server_folder = folder / "server"
    server_folder.mkdir()
    command = [sys.executable, "-m", "tests.stores.server", server_folder, 0, 0, rate]
    server = subprocess.Popen(list(map(str, command)))
    try:
        while not (server_folder / "port").exists():
            time.sleep(0.1)
        there = {**SECRETS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{(server_folder / 'port').read_text()}"}
        there |= {"HOSTDEV_STORE_CACHE": str(folder / "copies"), "HOSTDEV_STORE_CACHE_SIZE": str(4 * shard)}
        subprocess.run([sys.executable, "-c", _PUT, folder / "data"], check=True, env={**os.environ, **there})
        found: list[dict[str, float]] = []
        for number in range(rounds):
            local = _train(folder, "data", f"local-{number}", batch_size, {})
            store = _train(folder, "s3://bench/data", f"store-{number}", batch_size, there)
            assert local["digest"] == store["digest"]
            found.append({"local": local["rate"], "store": store["rate"]})
            print(f"local {local['rate']:,.0f} samples/s, store {store['rate']:,.0f}", flush=True)
    finally:
        server.terminate()
        server.wait()
    ratio = statistics.median(one["store"] / one["local"] for one in found)
    print(f"store/local {ratio:.3f} (median of {rounds}), shards of {shard / 1e6:.1f} MB")
    return {"rounds": found, "ratio": ratio, "shard_bytes": shard}


def _train(folder: Path, data: str, run: str, batch_size: int, more: dict[str, str]) -> dict[str, Any]:
    """Train two epochs; return the digest and samples/s."""
    flags = ["--host-device-mix", "--device", "cpu", "--batch-size", batch_size, "--epochs", 2, "--emb-dim", 16]
    _call("hostdev.train", "--data", data, "--run-dir", run, *flags, folder=folder, more=more)
    summary = json.loads((folder / run / "summary.json").read_text())
    return {"digest": summary["state_sha256"], "rate": summary["samples_per_second"]}


def _call(module: str, *arguments: Any, folder: Path, more: dict[str, str] | None = None) -> None:
    root = str(Path(__file__).parents[1])
    env = {**os.environ, **(more or {}), "PYTHONPATH": root}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=folder, env=env, stdout=subprocess.DEVNULL)
