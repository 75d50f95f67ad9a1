"""Claim: rows cost a step few launches, its thread never waits for the device, and running steps pin no memory.

The benchmark uses the tests' simulated accelerator: its times mean nothing, but its counts are those of any device. It
counts per step, in the step's thread, for both tables and a cache of 10% of the rows: operations that gather,
assemble, update and exchange rows (without views and allocations), with torch's operations and with Triton's kernels;
the thread's waits; and pinned allocations after the tenth step.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.record import get_versions, make_parser, record
from bench.wide_deep import FIELDS, FieldsBatch, make_trainer
from hostdev.device import backend, ops
from hostdev.device.ops import torch_operations, triton_kernels
from tests import standin  # the simulated accelerator
from tests.device import twins

ROWS, SIZE, DIM = 20_000, 200, 16
SETTLED, STEPS = 10, 30
PARTS = {
    "lookup": "gather",
    "gather": "gather",
    "assemble": "assembly",
    "uses_of": "sum of uses",
    "sum_uses": "sum of uses",
    "update": "update",
    "exchange": "exchange",
    "place": "late rows",
}
LIMITS = {"torch operations": 80, "Triton kernels": 20}
_LAUNCHES = {"empty": 0, "empty_like": 0, "empty_strided": 0, "new_empty": 0, "sum_uses": 2}  # others: 1


class Counting(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __init__(self, count: Counter[str], part: str) -> None:
        super().__init__()
        self._count, self._part = count, part

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(alias.alias_info and not alias.alias_info.is_write for alias in op._schema.returns):
            name = op._schema.name.partition("::")[2]
            self._count[self._part] += _LAUNCHES.get(name, 1)
        return op(*args, **(kwargs or {}))


@contextmanager
def counted(way: Any) -> Iterator[Counter[str]]:
    """Count an implementation's launches by purpose."""
    count: Counter[str] = Counter()

    def counting(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with Counting(count, part):
                return function(*args, **kwargs)

        return call

    before = {name: getattr(way, name) for name in PARTS}
    for name, part in PARTS.items():
        setattr(way, name, counting(before[name], part))
    try:
        yield count
    finally:
        for name, function in before.items():
            setattr(way, name, function)


def batches(count: int) -> list[FieldsBatch]:
    """Return batches of Zipf-like ids."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        ids = (ROWS * rng.random((SIZE, FIELDS)) ** 4).astype(np.int32)
        label = (rng.random(SIZE) < 0.3).astype(np.float32)
        made.append(FieldsBatch(label, ids, rng.random((SIZE, FIELDS), dtype=np.float32)))
    return made


def measure(name: str, way: Any, depth: int = 2) -> dict[str, Any]:
    """Train with an implementation, and return the counts of a step."""
    device = backend.select("standin")
    backend.make_deterministic(device)
    trainer = make_trainer(ROWS, DIM, device=device, depth=depth, cache="10%")
    waits: Counter[str] = Counter()
    me = threading.current_thread().name
    last = None
    with counted(way) as count:
        results = trainer.train(batches(STEPS))
        for number in range(1, STEPS + 1):
            before = standin.counters.waits_of(me)
            result = next(results)
            if number > SETTLED:
                waits += standin.counters.waits_of(me) - before
            if last is not None:
                assert np.isfinite(last.value.wide)  # available once the next step has been queued
            last = result
            if number == SETTLED:
                standin.counters.reset()
                count.clear()
        pinned = standin.counters.pinned_allocations
        operations = count.copy()  # covers as many steps: a step's rows are updated when the next step is requested
        results.close()
    steps = STEPS - SETTLED
    parts = {part: round(operations[part] / steps, 1) for part in dict.fromkeys(PARTS.values()) if operations[part]}
    total = round(sum(each for part, each in parts.items() if part != "late rows"), 1)
    return {
        "way": name,
        "depth": depth,
        "operations": parts,
        "total": total,
        "waits": dict(waits),
        "pinned_allocations": pinned,
        "state_sha256": trainer.state_sha256(),
    }


def main() -> None:
    """Count, print and record."""
    arguments = make_parser(__doc__).parse_args()
    standin.configure(schedule="lazy", check=True)
    torch.set_num_threads(1)
    twins.register()
    results = []
    for name, way in (("torch operations", torch_operations), ("Triton kernels", triton_kernels)):
        ops.FUSED.discard(standin.NAME)
        if way is triton_kernels:
            ops.FUSED.add(standin.NAME)
        found = measure(name, way)
        results.append(found)
        print(f"{name}, a step at depth {found['depth']}, both tables, cache 10%")
        for part, operations in found["operations"].items():
            print(f"    {part:<14}{operations:>8.1f}")
        print(f"    {'total':<14}{found['total']:>8.1f}  (at most {LIMITS[name]}, without late rows)")
        print(f"    the step's thread waited for: {found['waits'] or 'nothing'}")
        print(f"    pinned allocations after step {SETTLED}: {found['pinned_allocations']}\n")
    versions = get_versions("torch")
    record("launches", {"versions": versions, "steps": results}, arguments.out)
