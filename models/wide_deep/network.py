"""Wide & Deep: the sum of a linear model and a ReLU network over the same fields.

Source: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016. Sizes, initial values and learning
rates follow MindSpore's published model for Criteo. Like that model, this one also looks up a row for each dense column
and multiplies the row by the column's value.

Shapes: B samples, nd dense columns, F columns of ids, D columns of the deep table.

There are MindSpore's two losses: the wide loss, and the deep loss, which adds an L2 term.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostdev.core.initializers import Normal
from hostdev.core.optimizers import FTRL, LazyAdam, SparseOptimizer
from hostdev.core.pieces import Piece
from hostdev.data.schema import Schema
from hostdev.models.fields import (
    FIELDS,
    FieldsModel,
    collect_bags,
    concatenate_fields,
    require_single_label,
)
from hostdev.models.layers import hidden_pieces, in_float32, initialize, perceptron
from hostdev.models.model import Ids, ModelBatch, Rows
from hostdev.runtime.spec import Bag, TableSpec

L2_COEFFICIENT = 8e-5
L2_MODES = ("none", "batch", "table")
LAYERS = (1024, 512, 256, 128)


def wide_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Return the mean sigmoid cross entropy of logits [B] and labels [B]."""
    return F.binary_cross_entropy_with_logits(logits, label)


def deep_l2(rows: Tensor, uses: Tensor | None, places: Tensor | None = None) -> Tensor:
    """Return the L2 term of the deep loss for the looked-up rows, 8e-5 / 2 * sum of squares.

    Args:
        rows: float32 [U, D], the batch's unique deep rows, not weighted.
        uses: float32 [U], occurrences of each row in the batch (`--l2 batch`); None counts each row once (`--l2
            table`, whose gradient reaches only the batch's rows, as with lazy optimizers).
        places: int32 [U], indices of the rows in the order of summation; None for the order of `rows`.
    """
    squares = rows.square().sum(1)
    terms = squares if uses is None else squares * uses
    return (terms if places is None else terms.index_select(0, places)).sum() * (L2_COEFFICIENT / 2)


class WideDeep(FieldsModel):
    """logit = wide + bias + deep: the sum of the fields' wide weights, and a ReLU network on their deep rows.

    Args:
        schema: The data's schema; each dense column, column of ids and bag is a field.
        dim: D, columns of the deep table.
        seed: Seed of the initial values: N(0, 0.01^2) for all weights, biases and rows.
        optimizer: The deep table's optimizer, or None for LazyAdam(). The wide table always uses FTRL.
        layers: Widths of the hidden layers.
    """

    default_dim = 80
    lr = 3.5e-4

    def __init__(
        self,
        schema: Schema,
        dim: int,
        *,
        seed: int,
        optimizer: SparseOptimizer | None = None,
        layers: Sequence[int] = LAYERS,
    ) -> None:
        require_single_label(schema, "Wide & Deep")
        tables = {
            "wide": TableSpec(schema.rows, 1, FTRL()),
            "deep": TableSpec(schema.rows, dim, optimizer or LazyAdam()),
        }
        super().__init__(schema, tables, more=schema.dense)
        fields = len(schema.dense) + len(schema.columns)
        self.deep = perceptron([fields * dim, *layers, 1])
        self.bias = nn.Parameter(torch.zeros(1))
        initialize(self, seed, lambda name, parameter: Normal(0.01))

    def ids(self, batch: ModelBatch) -> dict[str, Ids]:
        """Return the ids of each feature.

        The ids of the feature FIELDS are [B, nd + F]: i for dense column i, then the ids of the F columns. Their
        weights are float32 [B, nd + F]: the values of the dense columns, then 1 for each of the F columns.
        """
        B, nd = batch.dense.shape
        ids = np.empty((B, nd + batch.ids.shape[1]), batch.ids.dtype)
        ids[:, :nd], ids[:, nd:] = np.arange(nd), batch.ids
        weights = np.empty(ids.shape, np.float32)
        weights[:, :nd], weights[:, nd:] = batch.dense, 1
        fields: dict[str, Ids] = {FIELDS: Bag(ids, weights=weights)} if FIELDS in self.features else {}
        return fields | collect_bags(self.schema, batch)

    def pieces(self) -> list[Piece]:
        """Return the network's segments in order: "input", the layers "deep.0", "deep.1", ..., and "output".

        The dense columns are unused, because the rows are already multiplied by their values. Each feature has a pair
        of rows (wide, deep): wide in float32, deep in autocast's dtype. The last layer is float32.
        """
        return [
            Piece("input", self._input, (self.bias,)),
            *hidden_pieces("deep", self.deep),
            Piece("output", lambda base, deep: base + in_float32(self.deep[-1], deep), (self.deep[-1],)),
        ]

    def _input(self, dense: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        wide, deep = (concatenate_fields(rows, self.features, table) for table in range(2))
        return wide.squeeze(-1).sum(1) + self.bias, deep.flatten(1)
