"""Who likes which film: users, films and bags of genres in plain torch. `movies.py` is the same on hostdev.

python examples/movies_torch.py
diff examples/movies_torch.py examples/movies.py
"""

import numpy as np
import torch
from torch import nn

USERS, FILMS, GENRES, DIM, BATCH = 20_000, 5_000, 30, 16, 512


class Top(nn.Module):
    """What a user makes of a film."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user: torch.Tensor, film: torch.Tensor, genres: torch.Tensor) -> torch.Tensor:
        """Logits [B] of the vectors of a user, a film and its genres, each [B, DIM]."""
        both = (user * (film + genres)).sum(1)
        return both + self.layers(torch.cat([user, film, genres], 1)).squeeze(1)


def batches(steps: int, seed: int = 0):
    """Yield dicts: user [B], film [B], genres [N] and the offsets [B] of each film's, label [B]."""
    rng = np.random.default_rng(seed)
    world = np.random.default_rng(42)
    taste, style = world.standard_normal((USERS, 4)), world.standard_normal((FILMS, 4))
    kinds = [world.choice(GENRES, world.integers(1, 4), replace=False) for _ in range(FILMS)]
    for _ in range(steps):
        user, film = rng.zipf(1.2, BATCH) % USERS, rng.zipf(1.2, BATCH) % FILMS
        lengths = np.array([len(kinds[one]) for one in film])
        liked = 1 / (1 + np.exp(-(taste[user] * style[film]).sum(1)))
        yield {
            "user": torch.from_numpy(user),
            "film": torch.from_numpy(film),
            "genres": torch.from_numpy(np.concatenate([kinds[one] for one in film])),
            "offsets": torch.from_numpy(np.cumsum(lengths) - lengths),
            "label": torch.from_numpy((rng.random(BATCH) < liked).astype(np.float32)),
        }


def main(steps: int = 600) -> list[float]:
    """Train, and return the losses."""
    torch.manual_seed(0)
    users, films, genres = (nn.EmbeddingBag(n, DIM, mode="mean", sparse=True) for n in (USERS, FILMS, GENRES))
    tables = torch.optim.SparseAdam([*users.parameters(), *films.parameters(), *genres.parameters()], lr=1e-2)
    model = Top()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches(steps):
        film = films(batch["film"][:, None])
        vectors = users(batch["user"][:, None]), film, genres(batch["genres"], batch["offsets"])
        logits = model(*vectors)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        tables.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        tables.step()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {np.mean(losses[:50]):.4f} -> {np.mean(losses[-50:]):.4f} over {steps} steps")
    return losses


if __name__ == "__main__":
    main()
