"""Predict who likes which film, in a loop on one process or several; only several need the lines marked # 1 to # 5.

The processes share the tables' rows and the 4 micro-batches of each batch. The number of processes must divide 4, and
changes no bit of the result.

python examples/processes.py [--small]
torchrun --nproc-per-node 2 examples/processes.py [--small]
"""

import films
import torch
from torch import nn
from torch.utils.data import DataLoader

import hostdev

DIM, BATCH, MICRO_BATCHES, LR = 16, 256, 4, 5e-3


class Liking(nn.Module):
    """Predicts whether a user likes a film."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, rows) -> torch.Tensor:
        """Return logits [B]."""
        user, film, genre = rows["user"], rows["film"], rows["genre"]
        return (user * (film + genre)).sum(1) + self.layers(torch.cat([user, film, genre], 1)).squeeze(1)


def ids(batch) -> dict[str, torch.Tensor]:
    """Return the ids of a batch by feature."""
    return {"user": batch[0], "film": batch[1], "genre": batch[2]}


def micro_batches(events, epoch: int) -> list:
    """Return an epoch's micro-batches, enough for whole steps, in the same order on all processes."""
    random = torch.Generator().manual_seed(epoch)
    made = list(DataLoader(events, BATCH // MICRO_BATCHES, shuffle=True, drop_last=True, generator=random))
    return made[: len(made) // MICRO_BATCHES * MICRO_BATCHES]


def train(data: films.Films, epochs: int) -> float:
    """Train, and return the AUC."""
    torch.set_num_threads(1)  # some bits depend on this number
    with hostdev.join() as ranks:  # 1: None if this process is alone
        rank, processes = (0, 1) if ranks is None else ranks.part()
        tables = {
            name: hostdev.HostTable(
                rows,
                DIM,
                hostdev.LazyAdam(lr=LR),
                name=name,
                init=hostdev.Normal(0.1),
                seed=1,
                part=None if ranks is None else ranks.part(),  # 2
            )
            for name, rows in data.sizes.items()
        }
        runtime = hostdev.Runtime(tables, device="cpu", ranks=ranks)  # 3
        torch.manual_seed(0)
        model = Liking()
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        each = MICRO_BATCHES // processes
        for epoch in range(epochs):
            every = micro_batches(data.events("train"), epoch)
            mine = [one for number, one in enumerate(every) if number // each % processes == rank]  # 4
            for (*_, liked, _), rows in runtime.train(mine, ids=ids, micro_batches=each):
                loss = nn.functional.binary_cross_entropy_with_logits(model(rows), liked)
                (loss / MICRO_BATCHES).backward()
                rows.reduce(model.parameters())
                if rows.is_due:
                    optimizer.step()
                    optimizer.zero_grad()
        every = [data.events("test").tensors]  # few enough for each process to score all of them
        with torch.no_grad():
            [scores] = [model(rows) for _, rows in runtime.predict(every, ids=ids)]
        found = films.auc(scores.numpy(), every[0][3].numpy())
        if rank == 0:  # 5
            print(
                f"AUC {found:.4f} on {processes} process{'es' if processes > 1 else ''}, "
                f"sum of the layers {sum(one.double().sum().item() for one in model.parameters()):.12f}"
            )
        return found


def train_torch(data: films.Films, epochs: int) -> float:
    """Train the same model in plain torch on one process, without micro-batches, and return the AUC."""
    made = {
        k: hostdev.HostTable(n, DIM, hostdev.LazyAdam(lr=LR), name=k, init=hostdev.Normal(0.1), seed=1)
        for k, n in data.sizes.items()
    }
    rows = {k: films.same_rows(nn.Embedding(t.rows, DIM, sparse=True), t) for k, t in made.items()}
    torch.manual_seed(0)
    model = Liking()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    sparse = torch.optim.SparseAdam([one.weight for one in rows.values()], lr=LR)
    for epoch in range(epochs):
        every = micro_batches(data.events("train"), epoch)
        for first in range(0, len(every), MICRO_BATCHES):
            batch = [torch.cat(columns) for columns in zip(*every[first : first + MICRO_BATCHES], strict=True)]
            logits = model({name: rows[name](one) for name, one in ids(batch).items()})
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch[3])
            for one in (optimizer, sparse):
                one.zero_grad()
            loss.backward()
            for one in (optimizer, sparse):
                one.step()
    batch = data.events("test").tensors
    with torch.no_grad():
        logits = model({name: rows[name](one) for name, one in ids(batch).items()})
    return films.auc(logits.numpy(), batch[3].numpy())


if __name__ == "__main__":
    train(films.make(**films.size(__doc__)), epochs=3)
