"""Predict which film a user watches next, with negatives that the model itself ranks high.

Every 20 steps the negatives are mined again: the unseen films of each user that the current tables rank first. A loop
prefetches batches, so negatives that its body mines would be used some batches later. Negatives that are mined between
two loops are used at once, and the tables have all steps so far. The file has the same program in plain torch and on
hostdev.

python examples/hard_negatives.py [--small]
"""

import films
import numpy as np
import torch
from torch import nn

import hostdev

DIM, BATCH, LR, STEPS, HARDEST = 16, 256, 1e-2, 20, 30
Batches = list[dict[str, torch.Tensor]]


def mine(data: films.Films, user: np.ndarray, film: np.ndarray, random: torch.Generator) -> torch.Tensor:
    """Return a negative for each training event, int64 [U, T]: one of the user's hardest by the tables' weights."""
    seen = torch.from_numpy(data.film[:, :-2])
    scores = torch.from_numpy(user @ film.T)
    hardest = scores.scatter(1, seen, -torch.inf).topk(HARDEST).indices
    return hardest.gather(1, torch.randint(HARDEST, seen.shape, generator=random))


def steps(data: films.Films, negative: torch.Tensor, order: torch.Tensor) -> Batches:
    """Return the batches of the events in `order`."""
    user = torch.arange(len(data.film))[:, None].expand_as(negative).flatten()
    film, negative = torch.from_numpy(data.film[:, :-2]).flatten(), negative.flatten()
    return [{"user": user[at], "film": film[at], "negative": negative[at]} for at in order.split(BATCH)]


def loss_of(user: torch.Tensor, film: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Return the loss of ranking the watched film above the negative; all arguments are rows [B, DIM]."""
    return -nn.functional.logsigmoid((user * (film - negative)).sum(1)).mean()


def make_tables(data: films.Films) -> tuple[hostdev.HostTable, hostdev.HostTable]:
    """Make the tables of users and films."""
    sizes = {"user": len(data.film), "film": len(data.genre)}
    user, film = (
        hostdev.HostTable(n, DIM, hostdev.LazyAdam(lr=LR), name=k, init=hostdev.Normal(0.1), seed=1)
        for k, n in sizes.items()
    )
    return user, film


def recall(data: films.Films, user: np.ndarray, film: np.ndarray) -> float:
    """Return recall@20 of each user's second-to-last film."""
    scores = torch.from_numpy(user @ film.T)
    return films.recall(scores, torch.from_numpy(data.film[:, -2]), torch.from_numpy(data.film[:, :-2]))


def train(data: films.Films, epochs: int, weights, learn) -> float:
    """Mine negatives and train in turn, and return recall@20.

    Args:
        data: The users and films.
        epochs: Passes over the training events.
        weights: Returns the current weights of users and films.
        learn: Trains on some batches.
    """
    random = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for order in torch.randperm(data.film[:, :-2].size, generator=random).split(STEPS * BATCH):
            learn(steps(data, mine(data, *weights(), random), order))
    return recall(data, *weights())


def train_torch(data: films.Films, epochs: int) -> float:
    """Train in plain torch, and return recall@20."""
    user, film = (films.same_rows(nn.Embedding(t.rows, DIM, sparse=True), t) for t in make_tables(data))
    sparse = torch.optim.SparseAdam([user.weight, film.weight], lr=LR)

    def learn(batches: Batches) -> None:
        for batch in batches:
            loss = loss_of(user(batch["user"]), film(batch["film"]), film(batch["negative"]))
            sparse.zero_grad()
            loss.backward()
            sparse.step()

    return train(data, epochs, lambda: (user.weight.detach().numpy(), film.weight.detach().numpy()), learn)


def train_hostdev(data: films.Films, epochs: int, **options) -> float:
    """Train on hostdev, and return recall@20."""
    user, film = make_tables(data)
    runtime = hostdev.Runtime({"user": user, "film": film, "negative": film}, device="cpu", **options)

    def learn(batches: Batches) -> None:
        for _, rows in runtime.train(batches):
            loss_of(rows["user"], rows["film"], rows["negative"]).backward()

    return train(data, epochs, lambda: (user.weights, film.weights), learn)


def main(epochs: int = 6, **size: int) -> tuple[float, float]:
    """Train both programs, and return their recall@20."""
    data = films.make(**size)
    found = train_torch(data, epochs), train_hostdev(data, epochs)
    print(f"recall@20 {found[1]:.4f}; plain torch {found[0]:.4f}")
    return found


if __name__ == "__main__":
    main(**films.size(__doc__))
