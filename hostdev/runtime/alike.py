"""Settings that must be equal on all ranks; otherwise the ranks would diverge, or fail to exchange data."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hostdev.distributed.agreement import UnlikeError, shown
from hostdev.host.table import HostTable
from hostdev.runtime.features import FeatureBinding, GroupSpec, Table
from hostdev.runtime.stacks import Stack


def get_settings(
    bindings: Sequence[FeatureBinding],
    stacks: Sequence[Stack],
    groups: Sequence[GroupSpec],
    device: str,
    depth: int,
    dense_exchange: str,
    caches: Sequence[str],
) -> Mapping[str, Any]:
    """Return the settings of a runtime that must be equal on all ranks, by name: its tables, features and options.

    Args:
        bindings: The features.
        stacks: The stacks. The features of a stack are returned as one tensor.
        groups: The groups of tables.
        device: The type of the device, such as "cuda".
        depth: Number of batches that are read ahead.
        dense_exchange: How the dense gradients are summed, one of `EXCHANGES`.
        caches: For each group, `EmbeddingCache.describe`. The sizes of caches may differ between ranks, and policies
            may differ, too, if none of them is "lookahead".
    """
    tables = [table for group in groups for table in group.tables]
    names = ", ".join(table.name for table in tables)
    found: dict[str, Any] = {"the list of tables": names}
    for table in tables:
        found |= {f"{what} of table {table.name!r}": value for what, value in _get_table(table).items()}
    features = [_describe_feature(one, groups) for one in bindings]
    found["the list of features"] = ", ".join(one.name for one in bindings)
    found |= {f"feature {one.name!r}": text for one, text in zip(bindings, features, strict=True)}
    found |= {f"stack {one.name!r}": ", ".join(bindings[number].name for number in one.features) for one in stacks}
    found["the kind of device"] = device
    found["depth"] = depth  # ranks exchange the ids of the batches that each has read ahead
    found["dense_exchange"] = dense_exchange
    for group, cache in zip(groups, caches, strict=True):
        found[f"the cache of table {group.tables[0].name!r}"] = cache
    furthest = max((table.window for table in tables if table.capabilities.on_disk), default=None)
    text = "no table on disk" if furthest is None else f"tables on disk that look {furthest} batches ahead"
    found["the storage of tables"] = shown(furthest, text)
    return found


def get_parameters(parameters: Sequence[Tensor]) -> Mapping[str, Any]:
    """Describe each parameter whose gradients the ranks sum, with a checksum. All ranks must get the same result."""
    found: dict[str, Any] = {"the number of parameters": len(parameters)}
    for number, one in enumerate(parameters):
        values = one.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        text = f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}, values with checksum "
        text += f"{zlib.crc32(values.numpy().data):08x}"
        found[f"parameter {number}"] = text
    return found


def make_marks(tables: Sequence[Table], frozen: Sequence[bool]) -> list[int]:
    """Return checksums and their negatives, whose maxima over the ranks show whether the ranks' settings are equal.

    The settings are the learning rates of the tables, which tables are frozen, and the keys that were erased.
    """
    rates = [float(table.optimizer.lr) for table in tables]
    erased = [table.erased for table in tables]
    marks = [zlib.crc32(np.array(values, np.float64).tobytes()) for values in (rates, frozen, erased)]
    return [*marks, *(-mark for mark in marks)]


def require_marks(largest: Sequence[int], step: int) -> None:
    """Raise UnlikeError if `make_marks` differs between ranks; `largest`: the maximum of each number over the ranks."""
    whats = "the learning rates of the tables differ", "the frozen tables differ", "the keys given to erase() differ"
    for what, most, least in zip(whats, largest[: len(whats)], largest[len(whats) :], strict=True):
        if most != -least:
            raise UnlikeError(f"step {step}: {what} between ranks; change them on all ranks equally, in the same step")


MARKS = 6


def get_erasures(tables: Sequence[Table]) -> Mapping[str, Any]:
    """Return what must be equal on all ranks before a checkpoint: the keys that were erased from tables by key."""
    return {f"the keys given to erase() of table {table.name!r}": f"checksum {table.erased:08x}" for table in tables}


def _get_table(table: Table) -> dict[str, Any]:
    return {
        **table.describe_size(),
        "dim": table.dim,
        "the optimizer": repr(table.optimizer),
        "the seed": table.seed,
        "init": repr(table.init) if isinstance(table, HostTable) else None,
        "dtype": table.dtype,
        "slots": table.slots_dtype,
        "the number of steps": table.step,
    }


def _describe_feature(one: FeatureBinding, groups: Sequence[GroupSpec]) -> str:
    tables = ", ".join(groups[group].tables[place].name for group, place in one.tables)
    feature = one.feature
    text = f"tables {tables}, pooling {feature.pooling}, padding {feature.padding}, dtype {feature.dtype}"
    return text + (f", unknown {feature.unknown}" if feature.unknown else "")
