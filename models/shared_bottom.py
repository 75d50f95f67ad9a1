"""Shared bottom: one ReLU network on all fields, and a tower on its output for each label.

Source: Caruana, "Multitask Learning", Machine Learning 28, 1997, in the form that Ma et al. (KDD 2018) compare MMoE
with. The sizes are ours.

Shapes: B samples, nd dense columns, F columns of ids (bags included), D columns of a vector.
"""

from collections.abc import Sequence

from hostdev.core.optimizers import LazyAdam, SparseOptimizer
from hostdev.core.pieces import Piece
from hostdev.data.schema import Schema
from hostdev.models.fields import FieldsModel
from hostdev.models.layers import Towers, glorot_normal, initialize, perceptron, with_zero_biases
from hostdev.runtime.spec import TableSpec

BOTTOM = (256, 128)
TOWER = (64,)


class SharedBottom(FieldsModel):
    """output_k = tower_k(bottom(dense, v_1, v_2, ...)) for label k; v_i is the vector of column i.

    Args:
        schema: The data's schema.
        dim: D, columns of the table "vectors".
        seed: Seed of the initial values: Glorot for layers, 0 for biases, N(0, 0.01^2) for vectors.
        optimizer: The table's optimizer, or None for LazyAdam with Adam's defaults.
        bottom: Widths of the shared layers.
        tower: Widths of each tower's hidden layers.
    """

    default_dim = 16
    lr = 1e-3

    def __init__(
        self,
        schema: Schema,
        dim: int,
        *,
        seed: int,
        optimizer: SparseOptimizer | None = None,
        bottom: Sequence[int] = BOTTOM,
        tower: Sequence[int] = TOWER,
    ) -> None:
        super().__init__(schema, {"vectors": TableSpec(schema.rows, dim, optimizer or LazyAdam(lr=1e-3))})
        widths = [len(schema.dense) + len(schema.columns) * dim, *bottom]
        self.bottom = perceptron(widths, linear=False)
        self.towers = Towers(len(schema.labels), widths[-1], tower)
        initialize(self, seed, with_zero_biases(glorot_normal))

    def pieces(self) -> list[Piece]:
        """Return the network's segments in order: "input", the layers "bottom.0", "bottom.1", ..., and "towers"."""
        bottom = [Piece(f"bottom.{i}", layer, (layer,)) for i, layer in enumerate(self.bottom)]
        return [Piece("input", self.concatenate), *bottom, Piece("towers", self.towers, (self.towers,))]
