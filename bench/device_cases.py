"""The operations that the benchmark `device` times: those of hostdev.device.ops, on the tensors of a training step.

Shapes: V rows of a table on the device, D columns, N occurrences of U unique rows. H of the unique rows are in the
cache, A are admitted, and M bypass the cache. As many rows are evicted as admitted. L rows conflict with the previous
batch.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import hostdev
from bench.workload import training_ids
from hostdev.core.optimizers import FTRL, LazyAdam
from hostdev.device.ops import Ops
from hostdev.device.ops.uses import FeatureUses

# Shares of a batch's unique rows that hit a cache of 10% and that are admitted, roughly as for real Criteo rows.
HITS, ADMITTED = 0.5, 0.1
LATE = 0.25  # share of the bypassing rows that the previous batch also uses
PLANES = 3  # weights and the two slots of either optimizer
OPTIMIZERS = {"LazyAdam": LazyAdam(), "FTRL": FTRL()}


class Case(NamedTuple):
    """One operation."""

    name: str
    moved: int  # bytes, each value read or written once
    start: Callable[[], tuple[Any, ...]]  # makes the tensors that the operation changes
    run: Callable[..., Any]  # runs the operation once, with an implementation and the tensors of `start`
    results: Callable[..., list[Tensor]]  # returns the results, from the tensors of `start` and the result of `run`
    scale: Callable[[], Tensor] | None = None  # sums of the absolute terms, if the order of addition may differ


class Batch:
    """A batch's rows on the device, random and the same in every run.

    Args:
        rows: V.
        dim: D.
        size: Number of samples.
        device: Device of the tensors.
    """

    def __init__(self, rows: int, dim: int, size: int, device: torch.device) -> None:
        rng = np.random.default_rng(3)
        ids = training_ids(rows, size)
        found, inverse = hostdev.ops.unique(ids.ravel())
        self.rows, self.dim, self.N, self.U = rows, dim, ids.size, len(found)
        self.H, self.A = int(self.U * HITS), int(self.U * ADMITTED)
        self.M = self.U - self.H - self.A
        slots = rng.permutation(rows)[: self.H + self.A].astype(np.int32)
        late = rng.permutation(self.M)[: int(self.M * LATE)].astype(np.int32)

        def there(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        def values(*shape: int) -> Tensor:
            return there(rng.standard_normal(shape, dtype=np.float32))

        self.inverse, self.ids = there(inverse), there(found)
        self.hit_slots, self.admitted_slots, self.late = there(slots[: self.H]), there(slots[self.H :]), there(late)
        self.uses = there(np.bincount(inverse, minlength=self.U))
        self.weights = there(rng.random(self.N, dtype=np.float32)) if dim > 1 else None  # as the wide table: none
        self.passed, self.unique_rows = values(self.M, dim), values(self.U, dim)
        self.admitted = values(self.A, PLANES, dim).abs_()
        self.grads, self.use_grads = values(self.U, dim) * 1e-3, values(self.N, dim) * 1e-3
        self.late_rows = values(len(late), dim)
        self.none = torch.zeros((), device=device)
        self.block = torch.empty((rows, PLANES, dim), device=device)
        step = max(1, (1 << 26) // (PLANES * dim))
        for first in range(0, rows, step):  # optimizer state such as sums of squares is not negative
            part = self.block[first : first + step]
            part.copy_(values(1, 1, PLANES * dim).abs_().view(1, PLANES, dim).expand_as(part))

    def per_row(self, rows: int) -> Tensor:
        """Return the optimizer state of one value per row, which these optimizers do not have."""
        return self.block.new_empty((rows, 0))

    def cases(self) -> Iterator[Case]:
        """Yield the operations of a step, those of the cache first."""
        row = self.dim * 4
        dtypes = (torch.float32, torch.bfloat16) if self.dim > 1 else (torch.float32,)
        yield self._pure("lookup", 2 * self.U * row + 4 * self.U, lambda ops: ops.lookup(self.block, self.ids))
        yield self._pure(
            "assemble",
            2 * self.U * row + 4 * self.H,
            lambda ops: ops.assemble(self.block, self.hit_slots, self.admitted, self.passed),
        )
        per_use = 4 if self.weights is None else 8
        for dtype in dtypes:
            moved = self.U * row + self.N * (per_use + self.dim * dtype.itemsize)
            yield self._pure(
                f"gather, {_short(dtype)}",
                moved,
                lambda ops, dtype=dtype: ops.gather(self.unique_rows, self.inverse, self.weights, dtype),
            )
        yield Case("uses_of", 8 * self.N, tuple, lambda ops: self._uses(ops), lambda out: [])
        for dtype in dtypes:
            yield self._sums(self.use_grads.to(dtype), per_use)
        for name, optimizer in OPTIMIZERS.items():
            yield self._update(name, optimizer)
        yield self._exchange()
        yield Case(
            "place",
            2 * len(self.late) * row + 4 * len(self.late),
            lambda: (self.unique_rows.clone(),),
            lambda ops, rows: ops.place(rows, self.late, self.late_rows),
            lambda rows, out: [rows],
        )

    def _uses(self, ops: Ops, weights: Tensor | None = None) -> Any:
        uses = FeatureUses(self.inverse, None, weights, False, torch.float32)
        return ops.uses_of([uses], self.U, in_order=True)

    def _pure(self, name: str, moved: int, run: Callable[[Ops], Tensor]) -> Case:
        return Case(name, moved, tuple, run, lambda out: [out])

    def _sums(self, grads: Tensor, per_use: int) -> Case:
        def run(ops: Ops, grads: Tensor = grads, weights: Tensor | None = self.weights) -> Tensor:
            return ops.sum_uses([grads], self._uses(ops, weights))

        def scale() -> Tensor:
            terms = grads.float() if self.weights is None else grads.float() * self.weights[:, None]
            zeros = torch.zeros_like(self.unique_rows)
            return zeros.index_put_((self.inverse.long(),), terms.abs(), accumulate=True)

        moved = self.N * (per_use + self.dim * grads.dtype.itemsize) + self.U * self.dim * 4
        return Case(f"uses_of + sum_uses, {_short(grads.dtype)}", moved, tuple, run, lambda out: [out], scale)

    def _update(self, name: str, optimizer: Any) -> Case:
        scalars = optimizer.scalars(1, self.dim)

        def start() -> tuple[Tensor, Tensor]:
            return self.block.clone(), self.admitted.clone()

        def run(ops: Ops, block: Tensor, admitted: Tensor) -> None:
            own, theirs = self.per_row(len(block)), self.per_row(self.A)
            ops.update(
                optimizer.primitive, block, own, self.hit_slots, self.grads, scalars, self.none, admitted, theirs
            )

        moved = (self.H + self.A) * self.dim * 4 * (2 * PLANES + 1) + 4 * self.H
        return Case(f"update, {name}", moved, start, run, lambda block, admitted, out: [block, admitted])

    def _exchange(self) -> Case:
        def start() -> tuple[Tensor, Tensor]:
            return self.block.clone(), self.admitted.clone()

        def run(ops: Ops, block: Tensor, admitted: Tensor) -> Tensor:
            own, theirs = self.per_row(len(block)), self.per_row(self.A)
            return ops.exchange(block, own, self.admitted_slots, self.A, admitted, theirs)[0]

        moved = 4 * self.A * PLANES * self.dim * 4 + 4 * self.A
        return Case("exchange", moved, start, run, lambda block, admitted, out: [block, out])


def _short(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp32"
