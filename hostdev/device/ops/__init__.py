"""What is done to rows on the device. A module a way of doing it, all with the same functions, to the same bits.

N uses in B bags, U unique rows, D columns; a block [any, 1 + S, D] holds rows with their S optimizer slots of D values,
row_slots [any, R] those of one value. The rows of a batch lie in the order H hits, A admitted, M that pass by.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hostdev.device import triton
from hostdev.device.ops import host_kernels, torch_operations, triton_kernels
from hostdev.device.ops.uses import FeatureUses

FUSED = {"cuda"}  # kinds of devices with Triton's kernels


class Ops(Protocol):
    """The functions of such a module."""

    def lookup(self, block: Tensor, ids: Tensor) -> Tensor:
        """Return the weights of rows, a copy: ids int32 or int64 [U] -> float32 [U, D]."""

    def assemble(self, block: Tensor, hit_slots: Tensor, admitted: Tensor, passed: Tensor) -> Tensor:
        """Return the weights of a batch's rows, float32 [H + A + M, D], a new tensor.

        block      float32 [C, 1 + S, D], the cache's
        hit_slots  int32 [H]
        admitted   float32 [A, 1 + S, D]
        passed     float32 [M, D]
        """

    def gather(self, rows: Tensor, inverse: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return each use's row times its weight, rounded to dtype.

        rows     float32 [U, D]
        inverse  int32 or int64 [N]
        weights  float32 [N]; None for 1
        dtype    torch.float32 or torch.bfloat16
        returns  dtype [N, D]
        """

    def pool(
        self, rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool, dtype: torch.dtype
    ) -> Tensor:
        """Return the sum over each bag's uses of their rows times their weights: ((t_a + t_b) + t_c) + ..., in order.

        rows     float32 [U, D]
        inverse  int32 [N]
        offsets  int32 [B + 1], where each bag's uses begin
        weights  float32 [N]; None for 1
        mean     the sum is divided by the number of uses
        dtype    torch.float32 or torch.bfloat16, to which it is rounded at the end
        returns  dtype [B, D]; 0 for an empty bag
        """

    def uses_of(self, features: Sequence[FeatureUses], rows: int, *, in_order: bool) -> Any:
        """Return what `sum_uses` needs to know of a batch, for all tables with the same ids.

        features  at least one
        rows      U
        in_order  they are numbered in order of first occurrence over the features' uses, end to end; each has a use
        """

    def sum_uses(self, grads: Sequence[Tensor], uses: Any) -> Tensor:
        """Return each row's gradient, the sum over its uses, float32 [U, D], each operation rounded once.

        grads  of each feature: float32 or bfloat16 [B, D], or [N, D] of one that is not pooled
        uses   from `uses_of`

        A use's term is the gradient of its bag, divided by the number of the bag's uses if it is a mean, times the
        use's weight. Terms are added in the order of the features, and of one feature in order of occurrence:
        ((t_a + t_b) + t_c) + ... On CUDA they are summed in segments of 64, and then the segments' sums, in order:
        `hostdev.device.triton.ops.sum_uses`. The sum of a row without uses is -0, which adds nothing to other sums.
        """

    def update(
        self,
        primitive: str,
        block: Tensor,
        row_slots: Tensor,
        ids: Tensor,
        grads: Tensor,
        scalars: tuple[Any, ...],
        skip: Tensor | None = None,
        admitted: Tensor | None = None,
        admitted_row_slots: Tensor | None = None,
    ) -> None:
        """Take one optimizer step on unique rows, in place: on those of a block, and on some that lie elsewhere.

        primitive  the optimizer's op, such as "FusedSparseFtrl"
        ids        int32 or int64 [H], rows of the block
        grads      float32 [any, D]: first those of the ids, then those of the admitted rows
        scalars    the optimizer's at this step
        skip       float32 []: nothing changes unless it is 0; None for 0
        admitted   float32 [A, 1 + S, D], admitted_row_slots float32 [A, R]; None for none
        """

    def round_rows(self, block: Tensor, ids: Tensor | None, row_ids: Tensor, key: int) -> None:
        """Round the weights of rows to what bfloat16 can represent, in place, as `kernels.rounding.round_rows`.

        block    float32 [any, 1 + S, D]
        ids      int32 or int64 [U], unique, rows of the block; None for the first ones
        row_ids  int32 or int64 [U], their ids in the table
        key      64 bits, of the table's step
        """

    def exchange(
        self,
        block: Tensor,
        row_slots: Tensor,
        slots: Tensor,
        leaving: int,
        admitted: Tensor,
        admitted_row_slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Put rows in, and return those that leave for the last of them, [E, 1 + S, D] and [E, R].

        slots     int32 [A], where the admitted rows go
        leaving   E: the last so many slots are taken, by rows that leave
        admitted  float32 [A, 1 + S, D], admitted_row_slots float32 [A, R]; may be overwritten
        """

    def place(self, rows: Tensor, positions: Tensor, values: Tensor) -> None:
        """Do rows[positions] = values: rows float32 [U, ...], positions int32 [L], all different, values [L, ...]."""


def ops_for(device: torch.device) -> Ops:
    """Return the way for a device: the host's own kernels where its memory is the host's, Triton's on CUDA."""
    found: ModuleType = torch_operations
    if device.type == "cpu":
        found = host_kernels
    elif device.type in FUSED and triton.available():
        found = triton_kernels
    return cast(Ops, found)
