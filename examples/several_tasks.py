"""Predict whether a user likes a film and watches it to its end: two tasks over shared experts (MMoE).

The file has the same program in plain torch and on hostdev, starting from the same rows.

python examples/several_tasks.py [--small]
"""

import films
import torch
from torch import nn
from torch.utils.data import DataLoader

import hostdev

DIM, BATCH, LR = 16, 256, 5e-3


def layers(inputs: int, outputs: int) -> nn.Sequential:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


class Mixture(nn.Module):
    """Experts that all tasks share; each task weights them with a gate of its own."""

    def __init__(self, experts: int = 3, tasks: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(layers(4 * DIM, DIM) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(4 * DIM, experts) for _ in range(tasks))
        self.heads = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(tasks))

    def forward(self, user: torch.Tensor, film: torch.Tensor, genre: torch.Tensor) -> torch.Tensor:
        """Return logits [tasks, B] for rows, each [B, DIM]."""
        inputs = torch.cat([user, film, genre, user * (film + genre)], 1)
        experts = torch.stack([expert(inputs) for expert in self.experts], 1)  # [B, experts, DIM]
        mixed = [(gate(inputs).softmax(1)[:, :, None] * experts).sum(1) for gate in self.gates]
        return torch.stack([head(one).squeeze(1) for head, one in zip(self.heads, mixed, strict=True)])


def loss_of(logits: torch.Tensor, liked: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tasks' losses."""
    return 2 * nn.functional.binary_cross_entropy_with_logits(logits, torch.stack([liked, finished]))


def loader(data: films.Films) -> DataLoader:
    """Return a loader of the training events, in a new order in each epoch."""
    return DataLoader(data.events("train"), BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))


def make_tables(data: films.Films) -> dict[str, hostdev.HostTable]:
    """Make the tables, by feature."""
    return {
        k: hostdev.HostTable(n, DIM, hostdev.LazyAdam(lr=LR), name=k, init=hostdev.Normal(0.1), seed=1)
        for k, n in data.sizes.items()
    }


def aucs(scores: list[torch.Tensor], data: films.Films) -> list[float]:
    """Return the AUC of each task, from the logits [2, B] of each batch of test events."""
    *_, liked, finished = data.events("test").tensors
    found = torch.cat(scores, 1).numpy()
    return [films.auc(one, label.numpy()) for one, label in zip(found, (liked, finished), strict=True)]


def train_torch(data: films.Films, epochs: int) -> list[float]:
    """Train in plain torch, and return the AUC of each task."""
    rows = {k: films.same_rows(nn.Embedding(t.rows, DIM, sparse=True), t) for k, t in make_tables(data).items()}
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    sparse = torch.optim.SparseAdam([one.weight for one in rows.values()], lr=LR)
    batches = loader(data)
    for _ in range(epochs):
        for user, film, genre, liked, finished in batches:
            logits = model(rows["user"](user), rows["film"](film), rows["genre"](genre))
            loss = loss_of(logits, liked, finished)
            optimizer.zero_grad()
            sparse.zero_grad()
            loss.backward()
            optimizer.step()
            sparse.step()
    with torch.no_grad():
        user, film, genre, _, _ = data.events("test").tensors
        return aucs([model(rows["user"](user), rows["film"](film), rows["genre"](genre))], data)


def train_hostdev(data: films.Films, epochs: int, **options) -> list[float]:
    """Train on hostdev, and return the AUC of each task."""
    runtime = hostdev.Runtime(make_tables(data), device="cpu", **options)
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    batches = loader(data)
    ids = lambda batch: {"user": batch[0], "film": batch[1], "genre": batch[2]}  # noqa: E731
    for _ in range(epochs):
        for (*_, liked, finished), rows in runtime.train(batches, ids=ids, read_ahead=True):
            logits = model(rows["user"], rows["film"], rows["genre"])
            loss = loss_of(logits, liked, finished)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        tests = runtime.predict(DataLoader(data.events("test"), 1024), ids=ids)
        return aucs([model(rows["user"], rows["film"], rows["genre"]) for _, rows in tests], data)


def main(epochs: int = 4, **size: int) -> tuple[list[float], list[float]]:
    """Train both programs, and return the AUCs of their tasks."""
    data = films.make(**size)
    plain, found = train_torch(data, epochs), train_hostdev(data, epochs)
    for task, one, other in zip(("liked", "finished"), found, plain, strict=True):
        print(f"{task}: AUC {one:.4f}; plain torch {other:.4f}")
    return plain, found


if __name__ == "__main__":
    main(**films.size(__doc__))
