"""Predict who likes which film: `movies_torch.py` with its tables in host memory.

The two programs print different losses, because torch's initial values have a deviation of 1, and hostdev's of 0.01.

python examples/movies.py
diff examples/movies_torch.py examples/movies.py
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import hostdev

SIZES = {"user": 20_000, "film": 5_000, "genres": 30}
DIM, BATCH = 16, 512


class Batch(NamedTuple):
    """Users [B], films [B], the films' genres [N] end to end, where each film's begin [B], and labels [B]."""

    user: torch.Tensor
    film: torch.Tensor
    genres: torch.Tensor
    offsets: torch.Tensor
    label: torch.Tensor


class Top(nn.Module):
    """Predicts whether a user likes a film."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user: torch.Tensor, film: torch.Tensor, genres: torch.Tensor) -> torch.Tensor:
        """Return logits [B] for the vectors of users, films and genres, each [B, DIM]."""
        both = (user * (film + genres)).sum(1)
        return both + self.layers(torch.cat([user, film, genres], 1)).squeeze(1)


def batches(steps: int, seed: int = 0):
    """Yield batches drawn from a fixed model of tastes and styles."""
    rng, world = np.random.default_rng(seed), np.random.default_rng(42)
    users, films, genres = SIZES.values()
    taste, style = world.standard_normal((users, 4)), world.standard_normal((films, 4))
    kinds = [world.choice(genres, world.integers(1, 4), replace=False) for _ in range(films)]
    for _ in range(steps):
        user, film = rng.zipf(1.2, BATCH) % users, rng.zipf(1.2, BATCH) % films
        lengths = np.array([len(kinds[one]) for one in film])
        liked = rng.random(BATCH) < 1 / (1 + np.exp(-(taste[user] * style[film]).sum(1)))
        bags = np.concatenate([kinds[one] for one in film]), np.cumsum(lengths) - lengths
        yield Batch(*map(torch.from_numpy, (user, film, *bags, liked.astype(np.float32))))


def main(steps: int = 600) -> list[float]:
    """Train, and return the losses."""
    torch.manual_seed(0)
    users, films, genres = (hostdev.HostTable(n, DIM, hostdev.LazyAdam(lr=1e-2), name=k) for k, n in SIZES.items())
    runtime = hostdev.Runtime({"user": users, "film": films, "genres": hostdev.Feature(genres, pooling="mean")})
    model = Top()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for batch, rows in runtime.train(
        batches(steps),
        ids=lambda b: {"user": b.user, "film": b.film, "genres": hostdev.Bag(b.genres, offsets=b.offsets)},
    ):
        logits = model(rows["user"], rows["film"], rows["genres"])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {np.mean(losses[:50]):.4f} -> {np.mean(losses[-50:]):.4f} over {steps} steps")
    return losses


if __name__ == "__main__":
    main()
