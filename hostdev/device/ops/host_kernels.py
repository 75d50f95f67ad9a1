"""Row operations if the CPU is the device: they call the host's kernels, because device memory is host memory.

The docstrings here hold for all implementations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hostdev.device.ops.catch_up import Clocks
from hostdev.device.ops.uses import Expansion, FeatureUses
from hostdev.kernels import bags, bfloat16, norm
from hostdev.kernels.apply import apply_rows
from hostdev.kernels.arrays import Strided, identity
from hostdev.kernels.clock import Clock
from hostdev.kernels.lookup import gather_scaled, lookup_tasks, store
from hostdev.kernels.lookup import lookup as look_up
from hostdev.kernels.pool import run_tasks


def lookup(block: Tensor, ids: Tensor) -> Tensor:
    """Return a copy of the weights of rows, float32 [U, D]; `ids` are int32 or int64 [U]."""
    out = torch.empty((len(ids), block.shape[2]), dtype=torch.float32)
    look_up(block.numpy(), ids.numpy(), out.numpy())
    return out


def clip_rows(grads: Tensor, limit: Any) -> Tensor:
    """Return the gradients [U, D]; scale rows whose mean square is above `limit`, as in `kernels.norm`."""
    return torch.from_numpy(norm.clipped(grads.detach().contiguous().numpy(), np.float32(limit)))


def assemble(block: Tensor, hit_slots: Tensor, admitted: Tensor, passed: Tensor) -> Tensor:
    """Return the weights of a batch's rows in a new tensor, float32 [H + A + M, D].

    Args:
        block: The rows in the cache's C slots, float32 [C, 1 + S, D].
        hit_slots: The slots of the hits, int32 [H].
        admitted: The admitted rows, float32 [A, 1 + S, D].
        passed: The bypassing rows, float32 [M, D].
    """
    H, A, M = len(hit_slots), len(admitted), len(passed)
    out = torch.empty((H + A + M, block.shape[2]), dtype=torch.float32)
    look_up(block.numpy(), hit_slots.numpy(), out[:H].numpy())
    out[H : H + A] = admitted[:, 0]
    look_up(passed.unsqueeze(1).numpy(), np.arange(M, dtype=np.int32), out[H + A :].numpy())
    return out


def gather(rows: Tensor, inverse: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return each occurrence's row times its weight, [N, D], rounded to `dtype`.

    Args:
        rows: The unique rows, float32 [U, D].
        inverse: The row of each occurrence, int32 or int64 [N].
        weights: The weight of each occurrence, float32 [N]; None for 1.
        dtype: torch.float32 or torch.bfloat16.
    """
    if weights is None:
        return rows.detach().index_select(0, inverse).to(dtype)
    out = torch.empty((len(inverse), rows.shape[1]), dtype=dtype)
    gather_scaled(rows.detach().numpy(), inverse.numpy(), weights.numpy(), _bits(out))
    return out


def pool(
    rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool, dtype: torch.dtype
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
    out = torch.empty((len(offsets) - 1, rows.shape[1]), dtype=dtype)
    bags.pool(rows.detach().numpy(), _feature(inverse, offsets, weights, mean), _bits(out))
    return out


def expand_many(features: Sequence[Expansion]) -> list[Tensor]:
    """Return the result of `pool` or `gather` for each feature; on the CPU, host threads share the pooling."""
    outs, tasks = [], []
    for rows, inverse, offsets, weights, mean, dtype in features:
        if offsets is None:
            outs.append(gather(rows, inverse, weights, dtype))
            continue
        outs.append(torch.empty((len(offsets) - 1, rows.shape[1]), dtype=dtype))
        feature = _feature(inverse, offsets, weights, mean)
        tasks += bags.pool_tasks(rows.detach().numpy(), feature, Strided(_bits(outs[-1])))
    run_tasks(tasks)
    return outs


def stack(features: Sequence[Expansion]) -> Tensor:
    """Return the results of `pool` or `gather` for F features in one tensor, [B, F, D].

    Args:
        features: The features, all with the same B, D and dtype.
    """
    F, B, D, kind = len(features), features[0].samples, features[0].rows.shape[1], features[0].dtype
    out = torch.empty((B, F, D), dtype=kind)
    memory, tasks = _bits(out).reshape(B * F, D), []
    for place, (rows, inverse, offsets, weights, mean, dtype) in enumerate(features):
        if offsets is not None:
            feature = _feature(inverse, offsets, weights, mean)
            tasks += bags.pool_tasks(rows.detach().numpy(), feature, Strided(memory, place, F))
        elif weights is None and dtype == torch.float32:
            to = np.arange(place, B * F, F, dtype=np.int32)
            tasks += lookup_tasks(rows.detach().unsqueeze(1).numpy(), inverse.numpy(), memory, to)
        else:
            out[:, place] = gather(rows, inverse, weights, dtype)
    run_tasks(tasks)
    return out


def uses_of(features: Sequence[FeatureUses], rows: int, *, in_order: bool) -> bags.Uses:
    """Return the occurrences of a batch's rows for `sum_uses`, shared by all tables with the same ids.

    Args:
        features: The features of a group, at least one.
        rows: U, the number of unique rows.
        in_order: Whether every row occurs, and rows are numbered by first occurrence in the concatenated features.
    """
    return bags.Uses([_feature(*feature[:4]) for feature in features], rows, in_order=in_order)


def sum_uses(grads: Sequence[Tensor], uses: bags.Uses) -> Tensor:
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
    out = torch.empty((uses.rows, grads[0].shape[1]), dtype=torch.float32)
    uses.sum([_strided(grad) for grad in grads], out.numpy())
    return out


def sum_many(calls: Sequence[tuple[Sequence[Tensor], bags.Uses]]) -> list[Tensor]:
    """Return what `sum_uses` returns for each call; on the CPU, the host's threads share the calls."""
    outs, arguments = [], []
    for grads, uses in calls:
        outs.append(torch.empty((uses.rows, grads[0].shape[1]), dtype=torch.float32))
        arguments.append((uses, [_strided(grad) for grad in grads], outs[-1].numpy()))
    bags.sum_many(arguments)
    return outs


def _strided(rows: Tensor) -> Strided:
    """Return rows [N, D] for a kernel, without a copy if evenly spaced in memory, as gradients of `torch.stack` are."""
    if rows.is_contiguous():
        return Strided(_bits(rows))
    D, apart, first = rows.shape[1], rows.stride(0), rows.storage_offset()
    if (D > 1 and rows.stride(1) != 1) or apart % D or first % D:
        return Strided(_bits(rows.contiguous()))
    end = first // D + (len(rows) - 1) * (apart // D) + 1
    return Strided(_bits(rows.as_strided((end, D), (D, 1), 0)), first // D, apart // D)


def _feature(inverse: Tensor, offsets: Tensor | None, weights: Tensor | None, mean: bool) -> bags.FeatureOccurrences:
    begins = None if offsets is None else offsets.numpy()
    scales = None if weights is None else weights.numpy()
    return bags.FeatureOccurrences(inverse.numpy(), begins, scales, mean)


def _bits(tensor: Tensor) -> Any:
    """Return a tensor's memory for a kernel: float32, or bfloat16 as uint16, since NumPy has no bfloat16."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.uint16).numpy()


def update(
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
        clocks: The table's copies of its clocks on the device, which save copying; None to copy all of `clock`.
    """
    if skip is not None and skip.item():
        return
    table = block.numpy(), row_slots.numpy()
    apply_rows(primitive, *table, ids.numpy(), grads.numpy(), scalars, clock=clock)
    if admitted is not None and admitted_row_slots is not None:
        here, theirs = np.arange(len(admitted), dtype=np.int32), grads[len(ids) :].numpy()
        rows = admitted.numpy(), admitted_row_slots.numpy()
        apply_rows(primitive, *rows, here, theirs, scalars, clock=clock)


def round_rows(block: Tensor, ids: Tensor | None, row_ids: Tensor, key: int, formats: tuple[int, ...]) -> None:
    """Round planes of rows, in place, to values that can be stored, as `kernels.bfloat16.round_rows` does.

    Args:
        block: The rows, float32 [any, 1 + S, D].
        ids: Unique rows of the block, int32 or int64 [U]; None for the first U.
        row_ids: The ids of these rows in the table, int32 or int64 [U].
        key: The 64-bit rounding key of the table's step.
        formats: The stored format of each plane, one of `kernels.plane_formats`.
    """
    at = identity(len(row_ids)) if ids is None else ids.numpy()
    bfloat16.round_rows(block.numpy(), at, row_ids.numpy(), key, formats)


def exchange(
    block: Tensor, row_slots: Tensor, slots: Tensor, leaving: int, admitted: Tensor, admitted_row_slots: Tensor
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
    at = slots.numpy()
    out = []
    for held, values in ((block.flatten(1), admitted.flatten(1)), (row_slots, admitted_row_slots)):
        left = torch.empty((leaving, held.shape[1]), dtype=torch.float32)
        if held.shape[1]:
            look_up(held.numpy()[:, None], at[len(at) - leaving :], left.numpy())
            store(held.numpy(), at, values.numpy())
        out.append(left)
    return out[0].view(-1, *block.shape[1:]), out[1]


def place(rows: Tensor, positions: Tensor, values: Tensor) -> None:
    """Set rows[positions] = values: rows float32 [U, ...], unique positions int32 [L], values [L, ...]."""
    rows.index_copy_(0, positions.long(), values)
