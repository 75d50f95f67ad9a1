"""Predict which film a user watches next: two towers, negatives from the batch, the exact top 20 of all films.

The file has the same program in plain torch and on hostdev, starting from the same rows.

python examples/two_tower.py [--small]
"""

import films
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import hostdev

DIM, BATCH, LR = 16, 256, 1e-2


class Towers(nn.Module):
    """Networks that turn the rows of users and of films into vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.of_user = nn.Linear(DIM, DIM)
        self.of_film = nn.Linear(2 * DIM, DIM)

    def users(self, user: torch.Tensor) -> torch.Tensor:
        """Return the users' vectors [B, DIM]."""
        return user + self.of_user(user)

    def films(self, film: torch.Tensor, genre: torch.Tensor) -> torch.Tensor:
        """Return the films' vectors [B, DIM]."""
        return film + self.of_film(torch.cat([film, genre], 1))


def loss_of(user: torch.Tensor, film: torch.Tensor, ids: torch.Tensor, log_count: torch.Tensor) -> torch.Tensor:
    """Return the softmax loss over the batch's films, corrected for their frequency; equal films are no negatives."""
    logits = user @ film.T - log_count[ids]
    same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    return nn.functional.cross_entropy(logits.masked_fill(same, -torch.inf), torch.arange(len(ids)))


def loader(data: films.Films) -> DataLoader:
    """Return a loader of the training events, in a new order in each epoch."""
    return DataLoader(data.events("train"), BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))


def log_counts(data: films.Films) -> torch.Tensor:
    """Return log(1 + count) of each film's training events, float32 [F]."""
    return torch.from_numpy(np.log(1 + np.bincount(data.film[:, :-2].ravel(), minlength=len(data.genre)))).float()


def make_tables(data: films.Films) -> dict[str, hostdev.HostTable]:
    """Make the tables, by feature."""
    return {
        k: hostdev.HostTable(n, DIM, hostdev.LazyAdam(lr=LR), name=k, init=hostdev.Normal(0.1), seed=1)
        for k, n in data.sizes.items()
    }


def recall(data: films.Films, user: torch.Tensor, film: torch.Tensor) -> float:
    """Return recall@20 of each user's second-to-last film, from the vectors of all users and films."""
    return films.recall(user @ film.T, torch.from_numpy(data.film[:, -2]), torch.from_numpy(data.film[:, :-2]))


def train_torch(data: films.Films, epochs: int) -> float:
    """Train in plain torch, and return recall@20."""
    rows = {k: films.same_rows(nn.Embedding(t.rows, DIM, sparse=True), t) for k, t in make_tables(data).items()}
    torch.manual_seed(0)
    model, log_count = Towers(), log_counts(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    sparse = torch.optim.SparseAdam([one.weight for one in rows.values()], lr=LR)
    batches = loader(data)
    for _ in range(epochs):
        for user, film, genre, _, _ in batches:
            vectors = model.users(rows["user"](user)), model.films(rows["film"](film), rows["genre"](genre))
            loss = loss_of(*vectors, film, log_count)
            optimizer.zero_grad()
            sparse.zero_grad()
            loss.backward()
            optimizer.step()
            sparse.step()
    with torch.no_grad():
        genre = rows["genre"](torch.from_numpy(data.genre))
        return recall(data, model.users(rows["user"].weight), model.films(rows["film"].weight, genre))


def train_hostdev(data: films.Films, epochs: int, **options) -> float:
    """Train on hostdev, and return recall@20."""
    runtime = hostdev.Runtime(make_tables(data), device="cpu", **options)
    torch.manual_seed(0)
    model, log_count = Towers(), log_counts(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    batches = loader(data)
    ids = lambda batch: {"user": batch[0], "film": batch[1], "genre": batch[2]}  # noqa: E731
    for _ in range(epochs):
        for batch, rows in runtime.train(batches, ids=ids, read_ahead=True):
            vectors = model.users(rows["user"]), model.films(rows["film"], rows["genre"])
            loss = loss_of(*vectors, batch[1], log_count)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    rows = runtime.lookup({"user": np.arange(len(data.film)), "film": np.arange(len(data.genre)), "genre": data.genre})
    with torch.no_grad():
        return recall(data, model.users(rows["user"]), model.films(rows["film"], rows["genre"]))


def main(epochs: int = 4, **size: int) -> tuple[float, float]:
    """Train both programs, and return their recall@20."""
    data = films.make(**size)
    found = train_torch(data, epochs), train_hostdev(data, epochs)
    print(f"recall@20 {found[1]:.4f}; plain torch {found[0]:.4f}")
    return found


if __name__ == "__main__":
    main(**films.size(__doc__))
