"""The benchmarks by name."""

import ast
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Bench(NamedTuple):
    """A benchmark.

    Attributes:
        module: Its module in bench/.
        regular: `make bench` runs it.
        options: The options that `make bench` passes.
        takes_criteo: It has an option `--criteo`.
        trial: Options for a short run that only shows that it still works.
    """

    module: str
    regular: bool = False
    options: tuple[str, ...] = ()
    takes_criteo: bool = False
    trial: tuple[str, ...] = ()

    @property
    def claim(self) -> str:
        """The first line of the module's docstring. The module is not imported."""
        text = ast.get_docstring(ast.parse((HERE / f"{self.module}.py").read_text())) or ""
        return text.splitlines()[0].removeprefix("Claim: ").removeprefix("Claims: ")


BENCHES = {
    "ops": Bench("bench_ops", regular=True, trial=("--rounds", "1")),
    "reader": Bench("bench_reader", regular=True, trial=("--rows", "200000", "--rounds", "1")),
    "timing": Bench("bench_timing", regular=True),
    "pool": Bench("bench_pool", regular=True, trial=("--rounds", "10")),
    "preprocess": Bench("bench_preprocess", regular=True, takes_criteo=True, trial=("--size", "20MB", "--rounds", "1")),
    "cluster": Bench("bench_cluster", trial=("--sizes", "20MB", "40MB", "--rounds", "1")),
    "query": Bench("bench_query", trial=("--rows", "50000", "--items", "5000", "--once")),
    "cache": Bench("bench_cache", regular=True, trial=("--steps", "4")),
    "pipeline": Bench(
        "bench_pipeline",
        regular=True,
        trial=("--rows", "100000", "--batch-sizes", "500", "500", "--depths", "2", "--steps", "4", "--rounds", "1"),
    ),
    "device": Bench("bench_device", regular=True, trial=("--device", "cpu", "--rounds", "2")),
    "loop": Bench(
        "bench_loop",
        regular=True,
        options=("--no-peers",),
        trial=("--no-peers", "--batch-size", "256", "--steps", "2", "--rounds", "1"),
    ),
    "checkpoint": Bench("bench_checkpoint", regular=True, trial=("--rows", "100000", "--steps", "4", "--rounds", "5")),
    "open": Bench("bench_open", regular=True, trial=("--rows", "100000")),
    "digest": Bench("bench_digest", regular=True, trial=("--rows", "50000", "--rounds", "1")),
    "ranks": Bench(
        "bench_ranks",
        regular=True,
        trial=("--rows", "100000", "--batch-sizes", "500", "--steps", "4", "--rounds", "1"),
    ),
    "hosts": Bench("bench_hosts", trial=("--rows", "100000", "--batch-size", "500", "--steps", "2", "--rounds", "1")),
    "peers": Bench("bench_peers"),
    "bags": Bench("bench_bags"),
    "keys": Bench("bench_keys", trial=("--sizes", "20000", "--rounds", "1", "--no-peers")),
    "disk": Bench(
        "bench_disk",
        trial=("--rows", "200000", "--memory", "80000000", "--warm", "2", "--steps", "2", "--no-peers"),
    ),
    "unbounded": Bench("bench_unbounded", trial=("--sizes", "20000", "--rounds", "1", "--large", "30000")),
    "stores": Bench("bench_stores", trial=("--rows", "20000", "--batch-size", "500", "--rounds", "1")),
    "follow": Bench("bench_follow", trial=("--files", "8", "--rows", "2000", "--seconds", "1", "--poll", "0.2")),
    "serve": Bench(
        "bench_serve",
        trial=(
            *("--table-rows", "20000", "--batch-size", "256"),
            *("--seconds", "0.2", "--rounds", "1", "--clients", "1", "4"),
        ),
    ),
    "dlrm": Bench("bench_dlrm"),
    "ctr": Bench("bench_ctr"),
    "parallel": Bench("bench_parallel"),
    "layouts": Bench("bench_layouts"),
    "large": Bench("bench_large"),
    "launches": Bench("bench_launches"),
    "scaling": Bench("scaling"),
    "machine": Bench("machine"),
    "report": Bench("device_report"),
    "figures": Bench("figures"),
}
