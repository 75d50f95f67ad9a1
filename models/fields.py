"""Fields: columns of ids, all looked up in the same tables, with one row per column and sample.

F columns of kind "id" form one feature without pooling, whose rows are [B, F, D]. Each bag is a separate feature with
mean pooling, and counts as one more field.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.errors import UserError
from hostdev.core.pieces import Piece, run
from hostdev.data.schema import Schema
from hostdev.models.model import Ids, Model, ModelBatch, Rows
from hostdev.runtime.spec import Bag, Feature, TableSpec

FIELDS = "fields"


def require_single_label(schema: Schema, model: str) -> None:
    """Raise UserError if the data has several labels, and the model predicts a single one."""
    if schema.targets.more:
        raise UserError(
            f"{model} predicts one label, but the data has {len(schema.labels)}: {', '.join(schema.labels)}; use "
            "--model mmoe or shared_bottom, or preprocess the data with one --label"
        )


def bag_feature(column: str) -> str:
    """Return the name of a bag's feature, which differs from FIELDS."""
    return f"bag:{column}"


def make_features(schema: Schema, tables: str | tuple[str, ...], *, more: Sequence[str] = ()) -> dict[str, Feature]:
    """Return the features that look up a schema's ids in `tables`.

    In FIELDS, the model puts the ids of the columns `more` before the schema's ids. In tables by key, each column of
    ids has its own out-of-vocabulary row.
    """
    if not schema.columns:
        raise UserError("the data has no column of ids, so no table is used; preprocess it with --categorical or --bag")
    names = (*more, *schema.ids)
    features = {FIELDS: Feature(tables, unknown=names)} if names else {}
    return features | {bag_feature(name): Feature(tables, pooling="mean", unknown=name) for name in schema.bags}


def collect_bags(schema: Schema, batch: ModelBatch) -> dict[str, Ids]:
    """Return the ids of a batch for each bag's feature.

    A weighted bag gets factors with which the feature's mean becomes a weighted mean: weights / mean weight of the bag.
    """
    found: dict[str, Ids] = {}
    for name in schema.bags:
        values, lengths = batch.bags[name]
        weights = _normalized(batch.bag_weights[name], lengths) if name in schema.weighted_bags else None
        found[bag_feature(name)] = Bag(values, lengths=lengths, weights=weights)
    return found


def _normalized(weights: npt.NDArray[np.float32], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Divide each weight [N] by the mean weight of its bag; all weights of a bag without a positive weight become 0."""
    bag = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(bag, weights, len(lengths))  # in float64, and in the order of the values
    factors = np.divide(lengths, sums, out=np.zeros(len(lengths)), where=sums > 0)
    return (weights * factors[bag]).astype(np.float32)


def concatenate_fields(rows: Rows, features: Iterable[str], table: int | None = None) -> Tensor:
    """Return the rows of all fields, [B, fields, D]; `table` is the table's index if features have several tables."""
    parts = [rows[name] if table is None else rows[name][table] for name in features]
    parts = [part if part.dim() == 3 else part.unsqueeze(1) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class FieldsModel(Model):
    """A model of segments that run one after the other, over all fields of a schema.

    Args:
        schema: The data's schema.
        tables: The tables, in which all fields have their rows.
        more: See `make_features`.
    """

    schema: Schema

    def __init__(self, schema: Schema, tables: dict[str, TableSpec], *, more: Sequence[str] = ()) -> None:
        super().__init__()
        names = tuple(tables)
        self.schema, self.tables = schema, tables
        self.features = make_features(schema, names if len(names) > 1 else names[0], more=more)

    def pieces(self) -> list[Piece]:
        """Return the network's segments in order."""
        raise NotImplementedError

    def ids(self, batch: ModelBatch) -> dict[str, Ids]:
        """Return the ids of the feature "fields", and of each bag."""
        fields: dict[str, Ids] = {FIELDS: batch.ids} if self.schema.ids else {}
        return fields | collect_bags(self.schema, batch)

    def forward(self, dense: Tensor, rows: Rows) -> Tensor:
        """Return logits float32 [B], or logits and predictions [B, labels] if there are several labels."""
        outputs: Tensor = run(self.pieces(), dense, rows)
        return outputs

    def concatenate(self, dense: Tensor, rows: Rows) -> Tensor:
        """Return the dense columns and the rows of all fields side by side, float32 [B, nd + fields * D]."""
        return torch.cat([dense, concatenate_fields(rows, self.features).flatten(1).float()], 1)
