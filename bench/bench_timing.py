"""Claim: timing every op, log lines included, costs under 1% of a step.

The benchmark multiplies the cost of timing an empty op by the number of ops in a step, and divides by the time of a
step in the same run.
"""

import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench.record import make_parser, record
from bench.wide_deep import make_trainer, read_fields
from hostdev.core.primitive import OpLog, Primitive
from hostdev.data import manifest
from hostdev.data.preprocess import synthetic
from hostdev.data.shards import ShardReader

CALLS = 20_000
STEPS = 20


def measure_timing() -> float:
    """Return the seconds that timing adds to a call of an op."""
    with tempfile.NamedTemporaryFile("w") as file:
        log = OpLog()
        log.write_to(file)  # type: ignore[arg-type]
        op = Primitive("Nothing", lambda: None, log=log)
        plain = op.run
        start = time.perf_counter()
        for _ in range(CALLS):
            op()
        log.close()
        timed = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(CALLS):
            plain()
        return (timed - (time.perf_counter() - start)) / CALLS


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    folder, _ = synthetic.ensure_lookalike()
    found = manifest.read(folder)
    per_call = statistics.median(measure_timing() for _ in range(5))
    print(f"one timed call: {per_call * 1e6:.2f} us")
    shares = {}
    for batch_size, dim in [(1000, 80), (100, 8)]:
        log = OpLog()
        trainer = make_trainer(found.vocabulary_size, dim, device=torch.device("cpu"), log=log)
        times = []
        for batch in itertools.islice(read_fields(ShardReader(Path(folder), found, "train"), batch_size), STEPS):
            start = time.perf_counter()
            for _ in trainer.train([batch]):
                pass
            times.append(time.perf_counter() - start)
        ops = sum(op["count"] for op in log.summary().values()) / STEPS
        step = statistics.median(times)
        print(
            f"batch {batch_size}, D = {dim}: step {step * 1e3:.2f} ms, {ops:.0f} ops, "
            f"timing {ops * per_call / step:.3%} of the step"
        )
        shares[f"batch {batch_size}, D = {dim}"] = ops * per_call / step
    record("timing", {"call_us": per_call * 1e6, "share_of_step": shares}, arguments.out)
