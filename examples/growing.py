"""Predict who likes which film while users join: each day has more users, and their table grows.

Each day's checkpoint is loaded into the next day's larger tables, with the optimizer's state. A warning gives both
numbers of rows; the new rows have their initial values. The result equals, to the bit, that of a table with the last
day's size from the start. The file has the same program in plain torch and on hostdev.

python examples/growing.py [--small]
"""

import tempfile

import films
import numpy as np
import torch
from torch import nn

import hostdev

DIM, BATCH, LR, DAYS = 16, 256, 1e-2, 3
Batches = list[list[torch.Tensor]]


def day(data: films.Films, number: int) -> tuple[int, Batches]:
    """Return the number of users on a day, and the day's batches: user, film and liked."""
    users, events = (number + 1) * len(data.film) // DAYS, data.film.shape[1] - 2
    at = slice(number * events // DAYS, (number + 1) * events // DAYS)
    user = np.arange(users).repeat(at.stop - at.start)
    columns = user, data.film[:users, at].ravel(), data.liked[:users, at].ravel()
    order = torch.randperm(len(user), generator=torch.Generator().manual_seed(number)).split(BATCH)
    return users, [[torch.from_numpy(column)[rows] for column in columns] for rows in order]


def make_table(name: str, rows: int) -> hostdev.HostTable:
    """Make a table."""
    return hostdev.HostTable(rows, DIM, hostdev.LazyAdam(lr=LR), name=name, init=hostdev.Normal(0.1), seed=1)


def score(user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
    """Return logits [B] for rows, each [B, DIM]; the last column is a bias."""
    return (user[:, :-1] * film[:, :-1]).sum(1) + user[:, -1] + film[:, -1]


def train_hostdev(data: films.Films, epochs: int, *, whole: bool = False, **options) -> tuple[float, np.ndarray]:
    """Train on hostdev; return the AUC and the users' rows. `whole`: the table has all users from the first day."""
    folder = tempfile.mkdtemp()
    for number in range(DAYS):
        users, batches = day(data, number)
        tables = {
            "user": make_table("user", len(data.film) if whole else users),
            "film": make_table("film", len(data.genre)),
        }
        runtime = hostdev.Runtime(tables, device="cpu", **options)
        if number:  # load the previous day's rows and optimizer state into the first rows of these tables
            runtime.load(folder, strict=False)
        for _ in range(epochs):
            for batch, rows in runtime.train(batches, ids=lambda batch: {"user": batch[0], "film": batch[1]}):
                logits = score(rows["user"], rows["film"])
                nn.functional.binary_cross_entropy_with_logits(logits, batch[2]).backward()
        runtime.save(folder)
    at, films_at, _, liked, _ = data.events("test").tensors
    rows = runtime.lookup({"user": at, "film": films_at})
    return films.auc(score(rows["user"], rows["film"]).numpy(), liked.numpy()), np.array(tables["user"].weights)


def train_torch(data: films.Films, epochs: int) -> float:
    """Train in plain torch, and return the AUC."""
    film = films.same_rows(nn.Embedding(len(data.genre), DIM, sparse=True), make_table("film", len(data.genre)))
    of_film, user, of_user = torch.optim.SparseAdam([film.weight], lr=LR), None, None
    for number in range(DAYS):
        users, batches = day(data, number)
        larger = films.same_rows(nn.Embedding(users, DIM, sparse=True), make_table("user", users))
        of_larger = torch.optim.SparseAdam([larger.weight], lr=LR)
        if user is not None:
            before = user.num_embeddings
            with torch.no_grad():
                larger.weight[:before] = user.weight
            state = of_user.state[user.weight]
            moments = {name: torch.zeros_like(larger.weight) for name in ("exp_avg", "exp_avg_sq")}
            for name, moment in moments.items():
                moment[:before] = state[name]
            of_larger.state[larger.weight] = {"step": state["step"], **moments}
        user, of_user = larger, of_larger
        for _ in range(epochs):
            for at, films_at, liked in batches:
                loss = nn.functional.binary_cross_entropy_with_logits(score(user(at), film(films_at)), liked)
                for optimizer in (of_user, of_film):
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in (of_user, of_film):
                    optimizer.step()
    at, films_at, _, liked, _ = data.events("test").tensors
    with torch.no_grad():
        return films.auc(score(user(at), film(films_at)).numpy(), liked.numpy())


def main(epochs: int = 3, **size: int) -> tuple[float, float]:
    """Train both programs, and return their AUCs."""
    data = films.make(**size)
    found = train_torch(data, epochs), train_hostdev(data, epochs)[0]
    print(f"AUC {found[1]:.4f}; plain torch {found[0]:.4f}")
    return found


if __name__ == "__main__":
    main(**films.size(__doc__))
