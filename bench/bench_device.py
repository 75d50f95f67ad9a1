"""Claim: on CUDA, Triton's kernels give the bits of torch's operations on rows, near the copy bandwidth.

The benchmark runs every operation of hostdev.device.ops on the tensors of a training step (`device_cases.py`): a batch
of 16,000 samples of 39 fields, 13 of which have the same id in every sample, with D = 80 and 1. Device time is
measured by events around a call, after work that flushes the caches and lets the host run ahead; host time is that of
queueing the call. Bytes count each value once, relative to the device's copy bandwidth in the same run. Both
implementations are compared to the bit; sums of rows with many uses, which Triton adds in segments, are compared with
a tolerance.

Without an accelerator the benchmark prints that and ends. `--device cpu` is a small trial: host kernels against
torch's operations.
"""

import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.device_cases import PLANES, Batch, Case
from bench.record import get_versions, make_parser, record
from hostdev.core.memory import format_bytes
from hostdev.device import backend, ops, triton
from hostdev.device.ops import host_kernels, torch_operations, triton_kernels
from hostdev.device.triton.ops import SEGMENT

SIZES = [(184_965, 80), (5_000_000, 80), (184_965, 1), (5_000_000, 1)]
TRIAL_SIZES = [(3000, 80), (3000, 1)]
BATCH, TRIAL_BATCH = 16_000, 100
WARM_UP = 5
# Relative to the sum of a row's absolute terms: n float32 additions in any order differ by about sqrt(n) x 6e-8 of it.
TOLERANCE = 1e-5
# For D = 1 on CUDA, torch adds 32 or more uses in another order than that of occurrence (`torch_operations.sum_uses`).
EXACT_USES = {1: 31}


class Clock:
    """Measures calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if backend.is_accelerator(device) else None
        nbytes = 1 << 29 if self._module else 1 << 20
        self._flushed = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self._module:
            torch.accelerator.synchronize(self._device)

    def measure(self, call: Callable[[], object], rounds: int) -> tuple[float, float]:
        """Return a call's median microseconds on the device and, queueing only, on the host."""
        for _ in range(WARM_UP):
            call()
        self.synchronize()
        device, host = [], []
        for _ in range(rounds):
            if self._module is None:
                start = time.perf_counter()
                call()
                device.append((time.perf_counter() - start) * 1e6)
                continue
            begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
            for _ in range(2):  # takes the device about half a millisecond
                self._flushed.zero_()
            begin.record()
            start = time.perf_counter()
            call()
            host.append((time.perf_counter() - start) * 1e6)
            end.record()
            end.synchronize()
            device.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(device), statistics.median(host or device)


def get_implementations(device: torch.device) -> dict[str, ModuleType]:
    """Return the implementations of the operations on a device, by name; torch's is the last."""
    ways = {"torch": torch_operations}
    if device.type == "cpu":
        return {"host kernels": host_kernels, **ways}
    if device.type in ops.FUSED and triton.available():
        return {"Triton": triton_kernels, **ways}
    return ways


def copy_bandwidth(clock: Clock, device: torch.device, rounds: int) -> float:
    """Return bytes read and written per microsecond by a copy on the device."""
    nbytes = 1 << 30 if backend.is_accelerator(device) else 1 << 26
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / clock.measure(lambda: target.copy_(source), rounds)[0]


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of the values whose bits are equal."""
    dtype = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    return one.contiguous().view(dtype) == other.contiguous().view(dtype)


def compare(case: Case, batch: Batch, one: list[Tensor], other: list[Tensor]) -> str:
    """Return as text how two results differ; "equal" means to the bit, and upper case a difference that is an error."""
    if not one:
        return ""
    if any(got.shape != wanted.shape for got, wanted in zip(one, other, strict=True)):
        return "DIFFERENT SHAPES"
    if all(bool(same_bits(*pair).all()) for pair in zip(one, other, strict=True)):
        return "equal"
    if case.scale is None:
        wrong = sum(int((~same_bits(*pair)).sum()) for pair in zip(one, other, strict=True))
        return f"{wrong:,} VALUES DIFFER"
    exact = EXACT_USES.get(batch.dim, SEGMENT)
    few = (batch.uses <= exact).unsqueeze(1)
    if not bool((same_bits(one[0], other[0]) | ~few).all()):
        return f"ROWS OF AT MOST {exact} USES DIFFER"
    error = float(((one[0] - other[0]).abs() / case.scale().clamp_min(1e-30)).max())
    if not error <= TOLERANCE:
        return f"HOT ROWS DIFFER BY {error:.1e}"
    return f"equal up to {exact} uses, others within {error:.0e}"


def measure(case: Case, batch: Batch, ways: dict[str, ModuleType], clock: Clock, copy: float, rounds: int) -> dict:
    """Run an operation by every implementation; compare the results; print and return the times."""
    row: dict[str, Any] = {"op": case.name, "bytes": case.moved}
    reference: list[Tensor] | None = None
    line, bits = f"  {case.name:<26}", ""
    for name, way in ways.items():
        state = case.start()
        results = [result.clone() for result in case.results(*state, case.run(way, *state))]
        if reference is None:
            reference = results
        else:
            bits = compare(case, batch, reference, results)
        del results
        device, host = clock.measure(lambda way=way, state=state: case.run(way, *state), rounds)
        key = name.lower().replace(" ", "_")
        share = case.moved / device / copy
        row |= {f"{key}_us": round(device, 2), f"{key}_host_us": round(host, 2), f"{key}_of_copy": round(share, 3)}
        line += f"{device:>12,.1f}{host:>9,.1f}{share:>8.0%}"
        del state
    times = [row[f"{name.lower().replace(' ', '_')}_us"] for name in ways]
    row |= {"speedup": round(times[-1] / times[0], 2), "bits": bits}
    print(f"{line}{row['speedup']:>9.2f}x{case.moved / 1e6:>10,.1f}  {bits}", flush=True)
    return row


def round_square_roots() -> None:
    """Give the trial NumPy's square root: torch's is correctly rounded on CUDA, but not on the CPU."""
    torch.Tensor.sqrt = lambda x: torch.from_numpy(np.sqrt(x.numpy()))  # type: ignore[method-assign]


def measure_size(
    rows: int, dim: int, size: int, device: torch.device, clock: Clock, copy: float, rounds: int
) -> list[dict]:
    """Measure all operations at one size; return nothing if the device has too little memory."""
    title = f"V = {rows:,}, D = {dim}, batch {size:,}"
    needed, free = 4 * rows * dim * PLANES * 4 + (4 << 30), backend.free_bytes(device)
    if backend.is_accelerator(device) and free is not None and needed > free:
        print(f"\n{title}: skipped: it needs {format_bytes(needed)}, but {format_bytes(free)} are free")
        return []
    batch = Batch(rows, dim, size, device)
    ways = get_implementations(device)
    print(
        f"\n{title}: {batch.N:,} uses of {batch.U:,} rows, {int(batch.uses.max()):,} at most of one; "
        f"{batch.H:,} hits, {batch.A:,} admitted and evicted, {batch.M:,} bypassing\n"
    )
    print(" " * 28 + "".join(f"{name:>29}" for name in ways))
    print(f"  {'op':<26}" + f"{'us':>12}{'host us':>9}{'of copy':>8}" * len(ways) + f"{'faster':>10}{'MB':>10}  bits")
    return [measure(case, batch, ways, clock, copy, rounds) for case in batch.cases()]


def main() -> int:
    """Measure, print and record; return 1 if two implementations differ."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="auto", help="the accelerator; cpu: a small trial")
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    device = backend.select(arguments.device)
    if not backend.is_accelerator(device) and arguments.device == "auto":
        print("bench device: torch sees no accelerator; nothing was measured")
        return 0
    trial = not backend.is_accelerator(device)
    backend.make_deterministic(device)
    if trial:
        round_square_roots()
    clock = Clock(device)
    copy = copy_bandwidth(clock, device, arguments.rounds)
    print(f"{backend.describe(device)}: copies {copy / 1e3:,.1f} GB/s, read and written" + " (a trial)" * trial)
    results = {}
    for rows, dim in TRIAL_SIZES if trial else SIZES:
        size = TRIAL_BATCH if trial else BATCH
        results[f"V = {rows:,} D = {dim}"] = measure_size(rows, dim, size, device, clock, copy, arguments.rounds)
    different = [
        f"{title}, {row['op']}: {row['bits']}"
        for title, rows in results.items()
        for row in rows
        if row["bits"].upper() == row["bits"] != ""
    ]
    print("\n" + ("\n".join(different) or "all implementations agree as stated"))
    versions = get_versions("torch")
    content = {
        "device": backend.describe(device),
        "trial": trial,
        "versions": versions,
        "ways": list(get_implementations(device)),
        "copy_gb_per_s": round(copy / 1e3, 2),
        "different": different,
        "results": results,
    }
    if arguments.out is not None or not trial:
        record("device", content, arguments.out)
    return 1 if different else 0
