"""A DeepFM of one's own over hostdev's tables: hot rows on the device, all others in host memory.

    python examples/deepfm.py [--rows 100000] [--cache 10%] [--steps 200]

The model and the loop are plain torch. `HostEmbedding` looks rows up and updates them with the table's own optimizer;
`EmbeddingCache.ahead` hands out the batches and looks at the ids of those to come. Leave the cache out (`--cache 0`)
and the result is the same, to the bit.
"""

import argparse

import numpy as np
import torch
from torch import nn

import hostdev

FIELDS, DIM = 26, 16


class DeepFM(nn.Module):
    """Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017."""

    def __init__(self, first_order: nn.Module, embedding: nn.Module) -> None:
        super().__init__()
        self.first_order, self.embedding = first_order, embedding
        self.deep = nn.Sequential(nn.Linear(FIELDS * DIM, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B] of ids [B, FIELDS]."""
        vectors = self.embedding(ids)  # [B, FIELDS, DIM]
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        return self.first_order(ids).sum((1, 2)) + pairs + self.deep(vectors.flatten(1)).squeeze(1)


def batches_of(rows: int, steps: int, size: int = 512):
    """Yield ids [size, FIELDS] whose popularity is Zipf's, and labels that depend on them."""
    rng = np.random.default_rng(0)
    liked = rng.standard_normal(rows)
    for _ in range(steps):
        ids = rng.zipf(1.2, (size, FIELDS)) * 2654435761 % rows
        label = rng.random(size) < 1 / (1 + np.exp(-liked[ids].sum(1)))
        yield torch.from_numpy(ids), torch.from_numpy(label.astype(np.float32))


def train(rows: int, cache_rows: str, steps: int, device: str = "cpu") -> tuple[list[float], list[hostdev.HostTable]]:
    """Train, and return the losses and the tables."""
    torch.manual_seed(0)
    tables = [
        hostdev.HostTable(rows, 1, hostdev.FTRL(), name="first_order"),
        hostdev.HostTable(rows, DIM, hostdev.LazyAdam(lr=1e-2), name="embedding"),
    ]
    cache = hostdev.EmbeddingCache(tables, cache_rows, device=device)  # both tables have the same ids: one plan
    modules = [hostdev.HostEmbedding(cache, table.name) for table in tables]
    model = DeepFM(*modules).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for ids, label in cache.ahead(batches_of(rows, steps), ids=lambda batch: batch[0]):
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for module in modules:
            module.step()
        losses.append(loss.item())
    statistics = cache.summary()
    print(f"loss {np.mean(losses[:20]):.4f} -> {np.mean(losses[-20:]):.4f} over {steps} steps on {device}; the cache "
          f"of {cache.capacity:,} rows had {statistics['hit_rate']:.1%} of uses, the optimum "
          f"{statistics['optimal_hit_rate'] or float('nan'):.1%}")  # fmt: skip
    return losses, tables


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A DeepFM over host tables and an embedding cache.")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--cache", default="10%")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    train(arguments.rows, arguments.cache, arguments.steps, arguments.device)
