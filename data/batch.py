"""One step's rows, as the reader hands them on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from hostdev.data.schema import Schema

from hostdev.core.errors import UserError

if TYPE_CHECKING:
    from hostdev.data.shards import ShardReader

FIELDS = 39  # of Wide & Deep, as it is trained so far


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows. The ids are those of the schema's joint space.

    label  float32 [B], 0 or 1
    dense  float32 [B, dense columns], scaled
    ids    int32 or int64 [B, columns of kind "id"]
    bags   by column of kind "bag": the ids of all rows end to end, as `ids` [N], and how many each row has, int32 [B]
    """

    label: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[Any]
    bags: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]

    def __len__(self) -> int:
        """Return B."""
        return len(self.label)


@dataclass(frozen=True, eq=False)
class WideBatch:
    """B rows of F fields: the dense columns, then those with ids."""

    label: npt.NDArray[np.float32]  # [B], 0 or 1
    ids: npt.NDArray[Any]  # int32 or int64 [B, F]
    weights: npt.NDArray[np.float32]  # [B, F]: the scaled value of a dense column, 1 for an id

    def __len__(self) -> int:
        """Return B."""
        return len(self.label)


def wide_fields(batch: Batch, schema: Schema) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Return ids and weights, both [B, F], of all columns: the dense ones with their own ids, and the value as weight.

    Raises UserError where there are bags.
    """
    if schema.bags:
        raise UserError(f"column {schema.bags[0]!r} is a bag, which this model has no place for")
    dense = len(schema.dense)
    ids = np.empty((len(batch), dense + batch.ids.shape[1]), batch.ids.dtype)
    weights = np.empty(ids.shape, np.float32)
    ids[:, :dense] = np.arange(dense)
    ids[:, dense:] = batch.ids
    weights[:, :dense] = batch.dense
    weights[:, dense:] = 1
    return ids, weights


def wide_batches(
    reader: "ShardReader", batch_size: int, *, seed: int | None = None, epoch: int = 0
) -> Iterator[WideBatch]:
    """Iterate over a reader's batches with all columns as fields; UserError where these are not 39."""
    for batch in reader.batches(batch_size, seed=seed, epoch=epoch):
        ids, weights = wide_fields(batch, reader.schema)
        if ids.shape[1] != FIELDS:
            raise UserError(f"the data has {ids.shape[1]} columns, and this model takes Criteo's {FIELDS}")
        yield WideBatch(batch.label, ids, weights)
