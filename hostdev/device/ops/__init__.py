"""Operations on rows on the device: one module per implementation, all with the same functions.

All implementations give identical results, except that on CUDA many terms are added in a different order (see
`sum_uses`).

Shapes: N occurrences in B bags, U unique rows, D columns. A block [any, 1 + S, D] holds rows with S optimizer state
columns of D values; row_slots [any, R] holds their R state columns of one value per row. A batch's rows are in this
order: H hits, A admitted, M bypassing.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hostdev.device import triton
from hostdev.device.ops import host_kernels, torch_operations, triton_kernels
from hostdev.device.ops.catch_up import Clocks
from hostdev.device.ops.uses import Expansion, FeatureUses
from hostdev.kernels.catch_up import Clock

FUSED = {"cuda"}  # device types with Triton kernels


class Ops(Protocol):
    """The functions of an implementation."""

    def lookup(self, block: Tensor, ids: Tensor) -> Tensor:
        """Return a copy of the weights of rows, float32 [U, D]; `ids` are int32 or int64 [U]."""

    def clip_rows(self, grads: Tensor, limit: Any) -> Tensor:
        """Return the gradients [U, D]; scale rows whose mean square is above `limit`, as in `kernels.norm`."""

    def assemble(self, block: Tensor, hit_slots: Tensor, admitted: Tensor, passed: Tensor) -> Tensor:
        """Return the weights of a batch's rows in a new tensor, float32 [H + A + M, D].

        Args:
            block: The rows in the cache's C slots, float32 [C, 1 + S, D].
            hit_slots: The slots of the hits, int32 [H].
            admitted: The admitted rows, float32 [A, 1 + S, D].
            passed: The bypassing rows, float32 [M, D].
        """

    def gather(self, rows: Tensor, inverse: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return each occurrence's row times its weight, [N, D], rounded to `dtype`.

        Args:
            rows: The unique rows, float32 [U, D].
            inverse: The row of each occurrence, int32 or int64 [N].
            weights: The weight of each occurrence, float32 [N]; None for 1.
            dtype: torch.float32 or torch.bfloat16.
        """

    def pool(
        self, rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool, dtype: torch.dtype
    ) -> Tensor:
        """Return each bag's sum of rows times weights, added in order: ((t_a + t_b) + t_c) + ...

        Args:
            rows: The unique rows, float32 [U, D].
            inverse: The row of each occurrence, int32 [N].
            offsets: The first occurrence of each bag, int32 [B + 1].
            weights: The weight of each occurrence, float32 [N]; None for 1.
            mean: Whether to divide the sum by the number of occurrences.
            dtype: torch.float32 or torch.bfloat16; rounded once, at the end.

        Returns:
            dtype [B, D]; 0 for an empty bag.
        """

    def expand_many(self, features: Sequence[Expansion]) -> list[Tensor]:
        """Return the result of `pool` or `gather` for each feature; on the CPU, host threads share the pooling."""

    def stack(self, features: Sequence[Expansion]) -> Tensor:
        """Return the results of `pool` or `gather` for F features in one tensor, [B, F, D].

        Args:
            features: The features, all with the same B, D and dtype.
        """

    def uses_of(self, features: Sequence[FeatureUses], rows: int, *, in_order: bool) -> Any:
        """Return the occurrences of a batch's rows for `sum_uses`, shared by all tables with the same ids.

        Args:
            features: The features of a group, at least one.
            rows: U, the number of unique rows.
            in_order: Whether every row occurs, and rows are numbered by first occurrence in the concatenated features.
        """

    def sum_uses(self, grads: Sequence[Tensor], uses: Any) -> Tensor:
        """Return each row's gradient, the sum over its occurrences, float32 [U, D]; each operation is rounded once.

        Each occurrence adds one term: its bag's gradient (divided by the bag's size if the pooling is a mean),
        multiplied by the occurrence's weight. Terms are added feature by feature, and within a feature in order of
        occurrence: ((t_a + t_b) + t_c) + ... CUDA first sums segments of 64 terms, then adds the segments' sums in
        order (`hostdev.device.triton.ops.sum_uses`). A row without occurrences gets -0, the neutral element of
        addition.

        Args:
            grads: For each feature, float32 or bfloat16 [B, D], or [N, D] if it is not pooled.
            uses: The result of `uses_of` for the same features.
        """

    def sum_many(self, calls: Sequence[tuple[Sequence[Tensor], Any]]) -> list[Tensor]:
        """Return what `sum_uses` returns for each call; on the CPU, the host's threads share the calls."""

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
        clock: Clock | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        """Take one optimizer step, in place, on unique rows of a block and on admitted rows.

        Args:
            primitive: The optimizer's op, such as "FusedSparseFtrl".
            block: The rows of a table or of a cache's slots, float32 [any, 1 + S, D].
            row_slots: Their per-row state, float32 [any, R].
            ids: The rows of the block to update, int32 or int64 [H].
            grads: The gradients of these rows, then those of the admitted rows, float32 [any, D].
            scalars: The optimizer's scalars at this step.
            skip: float32 []; if it is not 0, nothing changes; None means 0.
            admitted: The admitted rows, float32 [A, 1 + S, D]; None for no rows.
            admitted_row_slots: Their per-row state, float32 [A, R].
            clock: The step history from which to apply the steps that the rows have missed; None if they missed none.
            clocks: The table's clocks on the device; required with `clock`.
        """

    def round_rows(
        self, block: Tensor, ids: Tensor | None, row_ids: Tensor, key: int, formats: tuple[int, ...]
    ) -> None:
        """Round planes of rows to values that can be stored, in place: `kernels.bfloat16.round_rows`.

        Args:
            block: The rows, float32 [any, 1 + S, D].
            ids: Unique rows of the block, int32 or int64 [U]; None for the first U.
            row_ids: The ids of these rows in the table, int32 or int64 [U].
            key: The 64-bit rounding key of the table's step.
            formats: The stored format of each plane, one of `kernels.bfloat16`.
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
        """Write admitted rows to slots; return the E evicted rows, [E, 1 + S, D], and their per-row state [E, R].

        Args:
            block: The rows in the cache's C slots, float32 [C, 1 + S, D].
            row_slots: Their per-row state, float32 [C, R].
            slots: The slots of the admitted rows, int32 [A]; the last E hold rows that are evicted.
            leaving: E, the number of evicted rows.
            admitted: The admitted rows, float32 [A, 1 + S, D]; may be overwritten.
            admitted_row_slots: Their per-row state, float32 [A, R]; may be overwritten.
        """

    def place(self, rows: Tensor, positions: Tensor, values: Tensor) -> None:
        """Set rows[positions] = values: rows float32 [U, ...], unique positions int32 [L], values [L, ...]."""


def get_ops(device: torch.device) -> Ops:
    """Return a device's implementation: host kernels on the CPU, Triton on CUDA, torch operations elsewhere."""
    found: ModuleType = torch_operations
    if device.type == "cpu":
        found = host_kernels
    elif device.type in FUSED and triton.available():
        found = triton_kernels
    return cast(Ops, found)
