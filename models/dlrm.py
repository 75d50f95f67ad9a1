"""DLRM: a network on the dense columns, dot products of all vector pairs, and a network on both results.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv:1906.00091, 2019, with the sizes of MLPerf Training's DLRM benchmark (bottom 512-256-D, top 1024-1024-512-256-1,
D = 128) and the initial values of the authors' code. The table uses that code's row-wise Adagrad with its learning rate
of 0.01 (optim/rwsadagrad.py).

Deviations: the authors train the dense layers with SGD or Adagrad; here Adam is used, at its default of 1e-3. They
initialize vectors uniformly within 1 / sqrt(rows of a column's table); here the distribution is normal, because all
columns share one table.

Shapes: B samples, F columns of ids (bags included), n = F + 1 vectors (F without dense columns) of D columns each.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hostdev.core.errors import UserError
from hostdev.core.initializers import Initializer, Normal
from hostdev.core.optimizers import RowWiseAdagrad, SparseOptimizer
from hostdev.core.pieces import Piece
from hostdev.data.schema import Schema
from hostdev.models.fields import FieldsModel, concatenate_fields, require_single_label
from hostdev.models.layers import glorot_normal, hidden_pieces, in_float32, initialize, perceptron
from hostdev.models.model import Rows
from hostdev.runtime.spec import TableSpec

BOTTOM = (512, 256)
TOP = (1024, 1024, 512, 256)


class DLRM(FieldsModel):
    """logit = top(b, <v_i, v_j> for i > j) with v_0 = b = bottom(dense), and v_i the vector of column i.

    Args:
        schema: The data's schema.
        dim: D, the width of the bottom network's last layer.
        seed: Seed of the initial values: Glorot for layers, N(0, 1 / outputs) for biases, N(0, 0.01^2) for vectors.
        optimizer: The table's optimizer, or None for RowWiseAdagrad(lr=0.01).
        bottom: Widths of the bottom network's hidden layers.
        top: Widths of the top network's hidden layers.
    """

    default_dim = 128
    lr = 1e-3

    def __init__(
        self,
        schema: Schema,
        dim: int,
        *,
        seed: int,
        optimizer: SparseOptimizer | None = None,
        bottom: Sequence[int] = BOTTOM,
        top: Sequence[int] = TOP,
    ) -> None:
        require_single_label(schema, "DLRM")
        super().__init__(schema, {"vectors": TableSpec(schema.rows, dim, optimizer or RowWiseAdagrad(lr=1e-2))})
        nd, F = len(schema.dense), len(schema.columns)
        n = F + 1 if nd else F
        if n < 2:
            raise UserError(
                "DLRM needs pairs of vectors, but the data has one column of ids and no dense column; use another model"
            )
        self.bottom = perceptron([nd, *bottom, dim], linear=False) if nd else None
        self.top = perceptron([(dim if nd else 0) + n * (n - 1) // 2, *top, 1])
        places, back = _lower_triangle(n)
        self.register_buffer("_places", places, persistent=False)
        self.register_buffer("_back", back, persistent=False)
        initialize(self, seed, _init)

    def pieces(self) -> list[Piece]:
        """Return the network's segments in order: "input" with the bottom network, "top.0", ..., and "output".

        Under autocast, the top network's last layer is float32.
        """
        bottom = () if self.bottom is None else (self.bottom,)
        return [
            Piece("input", self._input, bottom),
            *hidden_pieces("top", self.top, alone=True),
            Piece("output", lambda top: in_float32(self.top[-1], top), (self.top[-1],)),
        ]

    def _input(self, dense: Tensor, rows: Rows) -> Tensor:
        vectors = concatenate_fields(rows, self.features)
        found = []
        if self.bottom is not None:
            found.append(self.bottom(dense))
            vectors = torch.cat([found[0].unsqueeze(1), vectors], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        found.append(_Pick.apply(products.flatten(1), self._places, self._back))  # type: ignore[no-untyped-call]
        return torch.cat(found, 1)


class _Pick(torch.autograd.Function):
    """Returns values[:, places] of values [B, N]; the backward pass is a gather, too.

    torch's own backward pass scatter-adds gradients to zeros: in an undefined order or, with deterministic algorithms,
    after a sort. Here the places are distinct, so each gradient is a single value or 0.

    Args:
        places: int64 [P], distinct.
        back: int64 [N], the index in `places` of each of the N values; P for values that are not in `places`.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return values.index_select(1, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return functional.pad(grad, (0, 1)).index_select(1, back), None, None  # the extra column is 0


def _lower_triangle(n: int) -> tuple[Tensor, Tensor]:
    """Return `places` and `back` of `_Pick` for the elements i > j of a flattened matrix [n, n], row by row."""
    i, j = torch.tril_indices(n, n, offset=-1)
    places = i * n + j
    back = torch.full((n * n,), len(places))
    back[places] = torch.arange(len(places))
    return places, back


def _init(name: str, parameter: Tensor) -> Initializer:
    return glorot_normal(parameter) if parameter.dim() == 2 else Normal(math.sqrt(1 / len(parameter)))
