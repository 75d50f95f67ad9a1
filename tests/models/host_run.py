"""A training run without overlap: a model over host tables, batch by batch. Every runtime must match it."""

import numpy as np
import torch
import torch.nn.functional as F

from hostdev.host.table import HostTable
from hostdev.models import make
from hostdev.runtime.spec import Bag


class HostRun:
    """A model and its tables; lookups and updates by HostTable, pooling by torch."""

    def __init__(self, name, schema, dim, seed, *, optimizer=None, **options):
        self.model = make(name, schema, dim, seed=seed, optimizer=optimizer, **options)
        self.tables = {
            key: HostTable(spec.rows, spec.dim, spec.optimizer, name=key, seed=seed, init=spec.init)
            for key, spec in self.model.tables.items()
        }
        self.adam = torch.optim.Adam(self.model.parameters(), lr=self.model.lr, eps=1e-8, fused=True)

    def step(self, batch):
        """Take a step, and return the loss before it."""
        looked_up = {key: [] for key in self.tables}
        logits = self.model(torch.from_numpy(batch.dense), self.rows(batch, looked_up))
        loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.label))
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        for key, found in looked_up.items():
            ids, grads = [ids for ids, _ in found], [rows.grad.numpy() for _, rows in found]
            self.tables[key].apply(np.concatenate(ids), np.concatenate(grads))
        return loss.item()

    @torch.no_grad()
    def predict(self, batch):
        rows = self.rows(batch, {key: [] for key in self.tables})
        return self.model(torch.from_numpy(batch.dense), rows).numpy()

    def rows(self, batch, looked_up):
        """Return each feature's rows, as the model gets them; record ids and leaves by table."""
        rows = {}
        for feature_name, given in self.model.ids(batch).items():
            feature = self.model.features[feature_name]
            bag = given if isinstance(given, Bag) else Bag(given)
            found = []
            for key in [feature.tables] if feature.is_single else feature.tables:
                leaf = torch.from_numpy(self.tables[key].lookup(bag.values.ravel())).requires_grad_()
                looked_up[key].append((bag.values.ravel(), leaf))
                found.append(pooled(leaf, bag, feature.pooling))
            rows[feature_name] = found[0] if feature.is_single else tuple(found)
        return rows


def pooled(leaf, bag, pooling):
    if bag.weights is not None:
        leaf = leaf * torch.from_numpy(bag.weights).reshape(-1, 1)
    if pooling is None:
        return leaf.view(*bag.values.shape, -1)
    assert pooling == "mean"
    parts = leaf.split(bag.lengths.tolist())
    return torch.stack([part.mean(0) if len(part) else leaf.new_zeros(leaf.shape[1]) for part in parts])
