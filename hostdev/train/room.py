"""Checks, before anything is allocated, that a model's tables and the copies of their rows fit in memory."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

from hostdev.checkpoint.manager import SAVING_BYTES
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, copied_bytes, format_bytes, pinned_size, require_table, row_bytes
from hostdev.core.table_dtypes import FP32
from hostdev.data.batch import Batch
from hostdev.device.backend import free_bytes, is_accelerator
from hostdev.kernels.shards import range_of
from hostdev.models.model import Model
from hostdev.models.wide_deep.network import wide_loss
from hostdev.runtime import placement
from hostdev.runtime.spec import CacheSpec, TableSpec
from hostdev.train.build import groups_of
from hostdev.train.network import DenseAdam, inputs_like


class HostBudget(NamedTuple):
    """Free bytes of host memory, and the bytes that the tables' rows will take."""

    free: int
    parts: dict[str, int]  # as `hostdev.runtime.placement.kept` returns them

    def describe(self) -> str:
        """Return the bytes that the rows take and the free bytes as text; empty if the rows take nothing."""
        if not self.parts:
            return ""
        return (
            f"{format_bytes(sum(self.parts.values()))} of the host's {format_bytes(self.free)} free: "
            f"{placement.in_words(self.parts)}"
        )


def estimate_host_memory(
    model: Model,
    cache: CacheSpec | Mapping[str, CacheSpec] | None,
    part: tuple[int, int] | None,
    device: torch.device,
    *,
    depth: int,
    uses: int,
    saves: bool,
) -> dict[str, int]:
    """Estimate the bytes of host memory that training with tables in host memory takes, by purpose.

    Args:
        part: This rank's part of the tables' rows, as (rank, ranks); None for all rows.
        uses: Maximum number of ids in a batch, or in this rank's part of a batch.
        saves: Whether checkpoints will be saved.
    """
    sizes = []
    for names in groups_of(model):
        specs = [model.tables[name] for name in names]
        start, stop = (0, specs[0].rows) if part is None else range_of(specs[0].rows, *part)
        own = cache if isinstance(cache, CacheSpec | None) else next((cache[n] for n in names if n in cache), None)
        by_key = specs[0].keys is not None
        shapes, disks = [spec.shape for spec in specs], [spec.disk for spec in specs]
        sizes.append(placement.GroupSize(stop - start, shapes, True, own, by_key, disks))
    copies = SAVING_BYTES if saves else 0
    return placement.kept(sizes, depth=depth, slots_on_host=not is_accelerator(device), uses=uses, copies=copies)


def make_host_budget(parts: dict[str, int]) -> HostBudget:
    """Return the budget for the bytes that `estimate_host_memory` returned; raise UserError unless they are free.

    Callers do this before they create any table.
    """
    found = HostBudget(placement.free_with_counts(parts), parts)
    placement.require(parts, found.free)
    return found


def require_room(
    tables: Mapping[str, TableSpec], host_device_mix: bool, device: torch.device, part: tuple[int, int] | None
) -> int:
    """Return the bytes of memory that the tables, or this rank's part of them, leave free; 0 if this is not known.

    Raises:
        UserError: A table does not fit.
    """
    where = "host" if host_device_mix else "device"
    free = available_bytes() if host_device_mix else free_bytes(device)
    if free is None:
        return 0
    for name, spec in sorted(tables.items()):
        start, stop = (0, spec.rows) if part is None else range_of(spec.rows, *part)
        if spec.disk is not None:
            free -= spec.disk.nbytes
            continue
        dtypes = (spec.dtype, spec.slots_dtype) if host_device_mix else (FP32, FP32)
        free -= require_table(name, stop - start, spec.dim, spec.optimizer, free, where, *dtypes)
    return free


def require_copies(tables: Mapping[str, TableSpec], uses: int, batches: int, free: int, *, cached: bool) -> None:
    """Raise UserError unless pinned copies of this many batches fit in `free` bytes, even if no id occurs twice."""
    row, whole = row_bytes((spec.dim, spec.optimizer) for spec in tables.values())
    most = min(max(spec.rows for spec in tables.values()), uses)
    # A cache swaps whole rows in both directions. Without a cache, all of a batch's rows may be new forwarded rows,
    # which are copied in only one direction.
    each = copied_bytes(most, 2 * most if cached else most // 2 + 1, uses, row, whole)
    needed = batches * pinned_size(each)
    if needed > free:
        raise UserError(
            f"the copies of {batches} batches need up to {format_bytes(needed)} of pinned host memory, but the tables "
            f"leave {format_bytes(free)}; use a smaller --batch-size or --pipeline-depth"
        )


def measure_free_after_step(
    model: Model, sample: Batch, samples: int, device: torch.device, autocast: torch.dtype | None
) -> int | None:
    """Return the least free bytes of an accelerator in a step of the dense layers, or None if unknown.

    The model takes a step on zeros on this device, and cannot be used afterwards.

    Args:
        sample: A batch with the shapes of the model's inputs.
        samples: Samples of the step.

    Raises:
        UserError: The sizes of the model's inputs vary.
    """
    dense, rows = tree_map(
        lambda value: value.detach().to(device).requires_grad_(value.requires_grad),
        inputs_like(model, sample, autocast, samples),
    )
    parameters = list(model.to(device).parameters())
    adam = DenseAdam(parameters, fused=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast is not None):
        logits = model(dense, rows)
    torch.accelerator.synchronize(device)
    between = free_bytes(device)  # with everything that the backward pass needs
    wide_loss(logits, torch.zeros_like(logits)).backward()  # type: ignore[no-untyped-call]
    adam.step()
    torch.accelerator.synchronize(device)
    after = free_bytes(device)  # torch's allocator still holds its peak
    left = None if after is None or between is None else min(after, between)
    del dense, rows, logits, adam, parameters
    model.to("meta")
    module = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
    return left
