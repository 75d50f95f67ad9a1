"""The operations of `hostdev.device.triton.ops` for the key CPU, by the host's kernels: a registration for tests only.

With it a simulated accelerator, whose operations are the CPU's on hidden memory, runs the path of a CUDA device.
"""

import functools

import numpy as np
import torch

from hostdev.device.triton import ops
from hostdev.kernels.apply import apply_rows
from hostdev.kernels.bags import FeatureOccurrences, pool, sum_uses
from hostdev.kernels.lookup import gather_scaled, lookup, store


def _assemble(block, hit_slots, admitted, passed):
    out = torch.empty((len(hit_slots) + len(admitted) + len(passed), block.shape[2]))
    H, A = len(hit_slots), len(admitted)
    lookup(block.numpy(), hit_slots.numpy(), out.numpy()[:H])
    out[H : H + A] = admitted[:, 0]
    out[H + A :] = passed
    return out


def _lookup(block, ids):
    out = torch.empty((len(ids), block.shape[2]))
    lookup(block.numpy(), ids.numpy(), out.numpy())
    return out


def _gather_scaled(rows, inverse, weights, dtype):
    out = torch.empty((len(inverse), rows.shape[1]), dtype=dtype)
    stored = out.view(torch.uint16) if dtype == torch.bfloat16 else out
    weights = torch.ones(len(inverse)) if weights is None else weights
    gather_scaled(rows.numpy(), inverse.numpy(), weights.numpy(), stored.numpy())
    return out


def _exchange(block, row_slots, admitted_slots, leaving, admitted, admitted_row_slots):
    stay, slots = len(admitted) - leaving, admitted_slots.numpy()
    for there, here in ((block.flatten(1), admitted.flatten(1)), (row_slots, admitted_row_slots)):
        if there.shape[1]:
            gone = there[admitted_slots[stay:].long()]
            store(there.numpy(), slots, here.numpy())
            here[stay:] = gone


def _pool(rows, inverse, offsets, weights, mean, dtype):
    out = torch.empty((len(offsets) - 1, rows.shape[1]), dtype=dtype)
    stored = out.view(torch.uint16) if dtype == torch.bfloat16 else out
    weights = None if weights is None else weights.numpy()
    pool(rows.numpy(), FeatureOccurrences(inverse.numpy(), offsets.numpy(), weights, mean), stored.numpy())
    return out


def _sum_uses(grads, order, keys, starts, source, weights):
    """Sum with the host's kernel twice: the segments' terms, then the rows' segments."""
    terms = grads[order.long() if source is None else source[order.long()].long()].float()
    if weights is not None:
        terms = terms * weights[order.long()][:, None]
    out = torch.full((len(starts) - 1, grads.shape[1]), -0.0)
    if len(keys) == 0:
        return out
    keys, starts = keys.numpy(), starts.numpy().astype(np.int64)
    place = np.arange(len(keys))
    begins = (place - starts[keys]) % ops.SEGMENT == 0
    parts = np.empty((begins.sum(), grads.shape[1]), np.float32)
    sum_uses([FeatureOccurrences((np.cumsum(begins) - 1).astype(np.int32))], [terms.contiguous().numpy()], parts)
    rows, inverse = np.unique(keys[begins], return_inverse=True)
    sums = np.empty((len(rows), grads.shape[1]), np.float32)
    sum_uses([FeatureOccurrences(inverse.astype(np.int32))], [parts], sums)
    out[torch.from_numpy(rows).long()] = torch.from_numpy(sums)
    return out


def _update(primitive, block, row_slots, ids, grads, scalars, skip, admitted, admitted_row_slots):
    if skip is not None and skip.item() != 0:
        return
    numbers = [np.float32(scalar) for scalar in scalars]
    if primitive == "FusedSparseLazyAdam":
        numbers[-1] = bool(scalars[-1])  # nesterov
    elif primitive == "FusedSparseFtrl":
        numbers[-1] = scalars[-1]
    H = len(ids)
    apply_rows(primitive, block.numpy(), row_slots.numpy(), ids.numpy(), grads[:H].numpy(), tuple(numbers))
    if admitted is not None and len(admitted):
        here, rows = np.arange(len(admitted), dtype=np.int32), (admitted.numpy(), admitted_row_slots.numpy())
        apply_rows(primitive, *rows, here, grads[H : H + len(admitted)].numpy(), tuple(numbers))


TWINS = {
    "assemble": _assemble,
    "lookup": _lookup,
    "gather_scaled": _gather_scaled,
    "pool": _pool,
    "exchange": _exchange,
    "sum_uses": _sum_uses,
    "update": _update,
}


@functools.cache
def register():
    """Register the twins once per process; return the object that keeps them registered."""
    return register_on_cpu(TWINS)


def register_on_cpu(functions):
    """Register functions for the operations' CPU key."""
    library = torch.library.Library("hostdev", "IMPL")
    for name, function in functions.items():
        library.impl(name, function, "CPU")
    return library
