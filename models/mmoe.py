"""MMoE: experts on all fields and, for each label, a gate that mixes the experts' outputs and a tower on the mixture.

Source: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD 2018,
equations 5 to 7. The paper's synthetic experiments have 8 experts; the other sizes are ours.

Shapes: B samples, nd dense columns, F columns of ids (bags included), D columns of a vector, E experts, K labels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hostdev.core.optimizers import LazyAdam, SparseOptimizer
from hostdev.core.pieces import Piece
from hostdev.data.schema import Schema
from hostdev.models.fields import FieldsModel
from hostdev.models.layers import Towers, glorot_normal, initialize, perceptron, with_zero_biases
from hostdev.runtime.spec import TableSpec

EXPERTS = 8
EXPERT = (256, 128)
TOWER = (64,)


class MMoE(FieldsModel):
    """output_k = tower_k(sum over experts e of g_k(x)_e * expert_e(x)) for label k, with g_k(x) = softmax(W_k x).

    x has the dense columns and the looked-up rows of the table "vectors", concatenated.

    Args:
        schema: The data's schema.
        dim: D, columns of the table "vectors".
        seed: Seed of the initial values: Glorot for layers, 0 for biases, N(0, 0.01^2) for vectors.
        optimizer: The table's optimizer, or None for LazyAdam with Adam's defaults.
        experts: E, the number of experts.
        expert: Widths of each expert's layers.
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
        experts: int = EXPERTS,
        expert: Sequence[int] = EXPERT,
        tower: Sequence[int] = TOWER,
    ) -> None:
        if experts < 1 or not expert:
            raise ValueError("MMoE needs at least one expert with at least one layer")
        super().__init__(schema, {"vectors": TableSpec(schema.rows, dim, optimizer or LazyAdam(lr=1e-3))})
        n = len(schema.dense) + len(schema.columns) * dim
        self.experts = nn.ModuleList(perceptron([n, *expert], linear=False) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(n, experts, bias=False) for _ in schema.labels)
        self.towers = Towers(len(schema.labels), expert[-1], tower)
        initialize(self, seed, with_zero_biases(glorot_normal))

    def pieces(self) -> list[Piece]:
        """Return the network's segments in order: "input", "experts" with the gates, and "towers".

        The gates are float32 under autocast.
        """
        return [
            Piece("input", self.concatenate),
            Piece("experts", self._mixtures, (self.experts, self.gates)),
            Piece("towers", self.towers, (self.towers,)),
        ]

    def _mixtures(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return each label's mixture of the experts' outputs, float32 [B, expert's last width]."""
        found = torch.stack([expert(inputs) for expert in self.experts], 1).float()  # [B, E, width]
        with torch.autocast(inputs.device.type, enabled=False):
            weights = [torch.softmax(gate(inputs.float()), 1) for gate in self.gates]
        return tuple((each.unsqueeze(2) * found).sum(1) for each in weights)
