"""DCN-v2: cross layers, which multiply the input by linear maps of the previous layer's output, and a ReLU network.

Source: Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
Systems", WWW 2021: full and low-rank cross layers (one expert), stacked or parallel, He initialization, Adam at 1e-4 to
5e-4. Sizes, and Adagrad at 0.005 for the tables, follow MLPerf Training's DLRM-DCNv2: D = 128, 3 cross layers of rank
512, 1024-1024-512-256-1, stacked.

Deviations: dense columns are inputs directly, as in the paper; MLPerf applies a network to them first. The paper's
gradient clipping and weight averaging are not part of this model.

Shapes: B samples, nd dense columns, F columns of ids (bags included), n = nd + F * D.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hostdev.core.optimizers import Adagrad, SparseOptimizer
from hostdev.core.pieces import Piece
from hostdev.data.schema import Schema
from hostdev.models.fields import FieldsModel, require_single_label
from hostdev.models.layers import he_normal, in_float32, initialize, pass_through, perceptron, with_zero_biases
from hostdev.models.model import Rows
from hostdev.runtime.spec import TableSpec

LAYERS = (1024, 1024, 512, 256)
RANK = 512
STRUCTURES = ("stacked", "parallel")


class DCN(FieldsModel):
    """Cross layers x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, with * elementwise and x_0 = (dense, v_1, v_2, ...) [B, n].

    v_i is the vector of column i. The logit is last(deep(x_L)) if stacked, last(x_L, deep(x_0)) if parallel.

    Args:
        schema: The data's schema.
        dim: D, columns of the table "vectors".
        seed: Seed of the initial values: He for layers, 0 for biases, N(0, 0.01^2) for vectors.
        optimizer: The table's optimizer, or None for Adagrad(lr=0.005).
        layers: Widths of the hidden layers.
        cross_layers: L, the number of cross layers.
        rank: W_l = U_l V_l with U_l [n, rank] and V_l [rank, n] if these are smaller than W_l (2 * rank < n),
            otherwise W_l is full. None: W_l is always full.
        structure: "stacked" or "parallel".
    """

    default_dim = 128
    lr = 5e-4

    def __init__(
        self,
        schema: Schema,
        dim: int,
        *,
        seed: int,
        optimizer: SparseOptimizer | None = None,
        layers: Sequence[int] = LAYERS,
        cross_layers: int = 3,
        rank: int | None = RANK,
        structure: str = "stacked",
    ) -> None:
        require_single_label(schema, "DCN")
        if structure not in STRUCTURES:
            raise ValueError(f"the structure of DCN must be one of {', '.join(STRUCTURES)}, not {structure!r}")
        if rank is not None and rank < 1:
            raise ValueError(f"the rank of cross layers must be at least 1, or None for full layers, not {rank}")
        super().__init__(schema, {"vectors": TableSpec(schema.rows, dim, optimizer or Adagrad(lr=5e-3))})
        n = len(schema.dense) + len(schema.columns) * dim
        self.stacked = structure == "stacked"
        self.cross = nn.ModuleList(_cross_layer(n, rank) for _ in range(cross_layers))
        self.deep = perceptron([n, *layers], linear=False)
        outputs = [n, *layers][-1]
        self.last = nn.Linear(outputs if self.stacked else n + outputs, 1)
        initialize(self, seed, with_zero_biases(he_normal))

    def pieces(self) -> list[Piece]:
        """Return the network's segments in order: "input", "cross.0", ..., "cross", "deep.0", ..., and "output".

        Under autocast, the input, the cross layers' sums and the last layer are float32.
        """
        crosses = [Piece(f"cross.{i}", partial(_crossed, layer), (layer,)) for i, layer in enumerate(self.cross)]
        if self.stacked:  # the input is not needed after the last cross layer
            begin = Piece("cross", lambda first, crossed: crossed)
            end = Piece("output", lambda deep: in_float32(self.last, deep), (self.last,))
        else:
            begin = Piece("cross", lambda first, crossed: (crossed, first))
            end = Piece(
                "output", lambda crossed, deep: in_float32(self.last, torch.cat([crossed, deep], 1)), (self.last,)
            )
        deep = [
            Piece(f"deep.{i}", layer if self.stacked else partial(pass_through, layer), (layer,))
            for i, layer in enumerate(self.deep)
        ]
        return [Piece("input", self._input), *crosses, begin, *deep, end]

    def _input(self, dense: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        first = self.concatenate(dense, rows)
        return first, first


def _crossed(layer: nn.Module, first: Tensor, crossed: Tensor) -> tuple[Tensor, Tensor]:
    return first, first * layer(crossed) + crossed


def _cross_layer(n: int, rank: int | None) -> nn.Module:
    if rank is None or 2 * rank >= n:
        return nn.Linear(n, n)
    return nn.Sequential(nn.Linear(n, rank, bias=False), nn.Linear(rank, n))
