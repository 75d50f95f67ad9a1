"""DeepFM: the sum of a factorization machine and a ReLU network over the same vectors.

Source: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017. Its settings
for Criteo are D = 10, layers 400-400-400, ReLU, Adam (the paper gives no learning rate; here Adam's default of 1e-3 is
used) and dropout 0.5.

Deviation: no dropout by default; a subclass may pass `dropout`. Dropout draws from torch's generator on the device,
which --seed seeds before the model is built, and whose state is in checkpoints.

Shapes: B samples, nd dense columns, F columns of ids (bags included), D columns of a vector.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hostdev.core.initializers import Constant, Initializer, Normal
from hostdev.core.optimizers import LazyAdam, SparseOptimizer
from hostdev.core.pieces import Piece
from hostdev.data.schema import Schema
from hostdev.models.fields import FieldsModel, concatenate_fields, require_single_label
from hostdev.models.layers import glorot_normal, hidden_pieces, in_float32, initialize, perceptron
from hostdev.models.model import Rows
from hostdev.runtime.spec import TableSpec

LAYERS = (400, 400, 400)


class DeepFM(FieldsModel):
    """logit = bias + sum of w_i x_i + sum over pairs of <v_i, v_j> x_i x_j + network(v_1 x_1, v_2 x_2, ...).

    x_i is 1 for an id, and the column's value for a dense column. Dense columns occur in every sample, so their w_i and
    v_i are parameters of the module; w_i and v_i of ids are rows of the tables "first_order" and "vectors".

    Args:
        schema: The data's schema.
        dim: D, columns of the table "vectors".
        seed: Seed of the initial values: N(0, 0.01^2) for vectors, 0 for first-order weights and biases, Glorot for
            layers.
        optimizer: Both tables' optimizer, or None for LazyAdam with Adam's defaults.
        layers: Widths of the hidden layers.
        dropout: Dropout rate of the hidden layers.
    """

    default_dim = 10
    lr = 1e-3

    def __init__(
        self,
        schema: Schema,
        dim: int,
        *,
        seed: int,
        optimizer: SparseOptimizer | None = None,
        layers: Sequence[int] = LAYERS,
        dropout: float = 0.0,
    ) -> None:
        require_single_label(schema, "DeepFM")
        optimizer = optimizer or LazyAdam(lr=1e-3)
        tables = {
            "first_order": TableSpec(schema.rows, 1, optimizer, Constant(0.0)),
            "vectors": TableSpec(schema.rows, dim, optimizer, Normal(0.01)),
        }
        super().__init__(schema, tables)
        nd, F = len(schema.dense), len(schema.columns)
        self.bias = nn.Parameter(torch.zeros(1))
        self.dense_first_order = nn.Parameter(torch.zeros(nd)) if nd else None
        self.dense_vectors = nn.Parameter(torch.zeros(nd, dim)) if nd else None
        self.deep = perceptron([(nd + F) * dim, *layers, 1], dropout=dropout)
        initialize(self, seed, _init)

    def pieces(self) -> list[Piece]:
        """Return the network's segments in order: "input", the layers "deep.0", "deep.1", ..., and "output".

        Under autocast, everything but the hidden layers is float32.
        """
        own = (self.bias, self.dense_first_order, self.dense_vectors)
        return [
            Piece("input", self._input, tuple(one for one in own if one is not None)),
            *hidden_pieces("deep", self.deep),
            Piece("output", lambda base, deep: base + in_float32(self.deep[-1], deep), (self.deep[-1],)),
        ]

    def _input(self, dense: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        weights, vectors = (concatenate_fields(rows, self.features, table).float() for table in range(2))
        first_order = weights.squeeze(-1).sum(1)
        if self.dense_first_order is not None and self.dense_vectors is not None:
            first_order = first_order + (dense * self.dense_first_order).sum(1)
            vectors = torch.cat([dense.unsqueeze(2) * self.dense_vectors, vectors], 1)
        # Sum over all pairs: sum_{i<j} v_i v_j = ((sum v_i)^2 - sum v_i^2) / 2.
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        return self.bias + first_order + pairs, vectors.flatten(1)


def _init(name: str, parameter: Tensor) -> Initializer:
    if name == "dense_vectors":
        return Normal(0.01)
    return glorot_normal(parameter) if parameter.dim() == 2 else Constant(0.0)
