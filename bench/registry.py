"""The benchmarks by name."""

import ast
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Bench(NamedTuple):
    """One benchmark: its module, and whether `make bench` runs it, with which options."""

    module: str
    regular: bool = False
    options: tuple[str, ...] = ()
    takes_criteo: bool = False

    @property
    def claim(self) -> str:
        """The first line of the module's docstring. The module is not imported."""
        text = ast.get_docstring(ast.parse((HERE / f"{self.module}.py").read_text())) or ""
        return text.splitlines()[0].removeprefix("Claim: ").removeprefix("Claims: ")


BENCHES = {
    "ops": Bench("bench_ops", regular=True),
    "reader": Bench("bench_reader", regular=True),
    "timing": Bench("bench_timing", regular=True),
    "pool": Bench("bench_pool", regular=True),
    "preprocess": Bench("bench_preprocess", regular=True, takes_criteo=True),
    "cache": Bench("bench_cache", regular=True),
    "pipeline": Bench("bench_pipeline", regular=True),
    "device": Bench("bench_device", regular=True),
    "loop": Bench("bench_loop", regular=True, options=("--no-peers",)),
    "checkpoint": Bench("bench_checkpoint", regular=True),
    "open": Bench("bench_open", regular=True),
    "ranks": Bench("bench_ranks", regular=True),
    "peers": Bench("bench_peers"),
    "parallel": Bench("bench_parallel"),
    "layouts": Bench("bench_layouts"),
    "large": Bench("bench_large"),
    "launches": Bench("bench_launches"),
    "scaling": Bench("scaling"),
    "machine": Bench("machine"),
    "report": Bench("device_report"),
}
