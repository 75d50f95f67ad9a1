"""A model: a sum of rows and numbers."""

import torch
from torch import nn

from hostdev import Bag, Feature, LazyAdam, TableSpec


class Acme(nn.Module):
    """One table for everything; the rows of a bag are averaged."""

    lr = 1e-3
    default_dim = 4

    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__()
        torch.manual_seed(seed)
        self.bags = list(schema.bags)
        self.tables = {"all": TableSpec(schema.rows, dim, optimizer or LazyAdam(lr=1e-2))}
        self.features = {"ids": Feature("all", pooling="sum")}
        self.features |= {name: Feature("all", pooling="mean") for name in self.bags}
        self.top = nn.Linear(dim * len(self.features) + len(schema.dense), 1)

    def ids(self, batch):
        """Return the ids of all columns."""
        return {"ids": Bag(batch.ids), **{name: Bag(*batch.bags[name]) for name in self.bags}}

    def forward(self, dense, rows):
        """Return logits [B]."""
        return self.top(torch.cat([dense, *(rows[name] for name in self.features)], 1)).squeeze(1)
