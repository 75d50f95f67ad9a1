"""Columns whose embeddings do not change: their rows get gradients of 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hostdev.core.errors import UserError
from hostdev.core.optimizers import FTRL
from hostdev.data.schema import Schema
from hostdev.models.fields import FIELDS, bag_feature
from hostdev.models.model import Model


@dataclass(frozen=True)
class FrozenColumns:
    """The frozen columns, by the features that look them up.

    Attributes:
        features: For each feature with frozen columns, the mask of these among the schema's columns with one id, bool
            [F], or None if the feature is a bag.
        tables: By feature, whether the rows of each of its tables are frozen.
    """

    features: Mapping[str, Tensor | None]
    tables: Mapping[str, tuple[bool, ...]]

    def detach(self, rows: Any) -> Any:
        """Return a model's rows with those of the frozen columns detached from the graph."""
        if not self.features:
            return rows
        return {name: self._detach(name, rows[name]) if name in self.features else rows[name] for name in rows}

    def _detach(self, name: str, rows: Any) -> Any:
        mask, each = self.features[name], rows if isinstance(rows, tuple) else (rows,)
        found = []
        for is_frozen, values in zip(self.tables[name], each, strict=True):
            if not is_frozen:
                found.append(values)
            elif mask is None:
                found.append(values.detach())
            else:  # a model may have further ids before the schema's columns
                more = torch.zeros(values.shape[1] - len(mask), dtype=torch.bool)
                here = torch.cat([more, mask]).to(values.device)[None, :, None]
                found.append(torch.where(here, values.detach(), values))
        return tuple(found) if isinstance(rows, tuple) else found[0]


NOTHING_FROZEN = FrozenColumns({}, {})


def freeze_columns(model: Model, schema: Schema, names: Sequence[str]) -> FrozenColumns:
    """Return the frozen columns of a model: `names`, and the columns that share their ids.

    Rows of tables with one column, such as first-order weights, are trained. A gradient of 0 must not change a row.

    Raises:
        UserError: The model has other features than hostdev's own models, or a table's optimizer changes rows that
            have a gradient of 0.
    """
    spaces = {column.space for column in schema.columns if column.name in names}
    ids = torch.tensor([column.space in spaces for column in schema.columns if column.kind == "id"], dtype=torch.bool)
    features: dict[str, Tensor | None] = {FIELDS: ids} if ids.any() else {}
    features |= {bag_feature(one.name): None for one in schema.columns if one.kind == "bag" and one.space in spaces}
    tables, names_of_tables = {}, set()
    for feature in features:
        if feature not in model.features:
            raise UserError(
                f"--frozen-vectors needs the features of hostdev's own models, but this model has no feature "
                f"{feature!r}; freeze rows in the model, or leave out --frozen-vectors"
            )
        spec = model.features[feature]
        each = (spec.tables,) if spec.is_single else tuple(spec.tables)
        tables[feature] = tuple(model.tables[name].dim > 1 for name in each)
        names_of_tables |= {name for name in each if model.tables[name].dim > 1}
    for name in sorted(names_of_tables):
        optimizer = model.tables[name].optimizer
        if isinstance(optimizer, FTRL) or getattr(optimizer, "weight_decay", 0.0) > 0:
            raise UserError(
                f"--frozen-vectors: {optimizer!r} changes rows of table {name!r} that get no gradient; give another "
                "--table-optimizer, without weight decay"
            )
    return FrozenColumns(features, tables)
