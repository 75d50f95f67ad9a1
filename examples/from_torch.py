"""Take a plain torch model with embeddings to hostdev in the middle of its training, and back to plain torch.

python examples/from_torch.py
"""

import io

import torch
from torch import nn

import hostdev


class Plain(nn.Module):
    """Predicts who likes which film, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.film = nn.Embedding(200, 8, sparse=True), nn.Embedding(100, 8, sparse=True)
        self.top = nn.Linear(16, 1)

    def forward(self, user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        """Return logits [B]."""
        return self.top(torch.cat([self.user(user), self.film(film)], 1)).squeeze(1)


def make_plain():
    """Return the model, and the optimizers of its embeddings and of its other layers."""
    torch.manual_seed(0)
    model = Plain()
    tables = torch.optim.SparseAdam([model.user.weight, model.film.weight], lr=0.01)
    return model, tables, torch.optim.Adam(model.top.parameters(), lr=0.01)


def to_hostdev(checkpoint):
    """Return a runtime, the dense layers and their optimizer, as they are in a checkpoint of plain torch."""
    state, top = checkpoint["model"], nn.Linear(16, 1)
    tables = {}
    for number, name in enumerate(["user", "film"]):  # in the order in which SparseAdam got them
        rows, dim = state[f"{name}.weight"].shape
        tables[name] = table = hostdev.HostTable(rows, dim, hostdev.LazyAdam(lr=0.01), name=name)
        adam = checkpoint["tables"]["state"][number]
        with table.writing() as w:
            w.weights[:] = state[f"{name}.weight"]
            w.slots["m"][:], w.slots["v"][:] = adam["exp_avg"], adam["exp_avg_sq"]
        table.step = int(adam["step"])  # on which Adam's learning rate depends
    top.load_state_dict({name.removeprefix("top."): value for name, value in state.items() if name.startswith("top.")})
    dense = torch.optim.Adam(top.parameters(), lr=0.01)
    dense.load_state_dict(checkpoint["dense"])
    return hostdev.Runtime(tables, device="cpu"), top, dense


def to_torch(runtime, top, dense):
    """Return a checkpoint of plain torch; the inverse of `to_hostdev`."""
    state = {f"top.{name}": value for name, value in top.state_dict().items()}
    _, sparse, _ = make_plain()
    adam = sparse.state_dict()
    for number, (name, table) in enumerate(runtime.tables.items()):
        state[f"{name}.weight"] = torch.tensor(table.weights)
        m, v = torch.tensor(table.slots["m"]), torch.tensor(table.slots["v"])
        adam["state"][number] = {"step": table.step, "exp_avg": m, "exp_avg_sq": v}
    return {"model": state, "tables": adam, "dense": dense.state_dict()}


def batches(first: int, last: int):
    """Yield (user, film, label) of the steps from `first` to `last`."""
    for step in range(first, last):
        random = torch.Generator().manual_seed(step)
        user, film = torch.randint(200, (64,), generator=random), torch.randint(100, (64,), generator=random)
        yield user, film, (user % 2 + film % 2 > 0).float()


def train_plain(first: int, last: int, checkpoint=None):
    """Train in plain torch from a checkpoint; return the new one, as read from a file, and the last loss."""
    model, tables, dense = make_plain()
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        tables.load_state_dict(checkpoint["tables"])
        dense.load_state_dict(checkpoint["dense"])
    for user, film, label in batches(first, last):
        loss = nn.functional.binary_cross_entropy_with_logits(model(user, film), label)
        tables.zero_grad()
        dense.zero_grad()
        loss.backward()
        tables.step()
        dense.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "tables": tables.state_dict(), "dense": dense.state_dict()}, file)
    file.seek(0)
    return torch.load(file), loss.item()


def train_on_hostdev(first: int, last: int, checkpoint):
    """Train on hostdev from a checkpoint of plain torch; return the new one, and the last loss."""
    runtime, top, dense = to_hostdev(checkpoint)
    for (_, _, label), rows in runtime.train(batches(first, last), ids=lambda b: {"user": b[0], "film": b[1]}):
        logits = top(torch.cat([rows["user"], rows["film"]], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        dense.zero_grad()
        loss.backward()
        dense.step()
    return to_torch(runtime, top, dense), loss.item()


def main() -> tuple[float, float]:
    """Return the loss after 300 steps of plain torch, and after 100 of torch, 100 of hostdev and 100 of torch."""
    _, straight = train_plain(0, 300)
    checkpoint, first = train_plain(0, 100)
    checkpoint, then = train_on_hostdev(100, 200, checkpoint)
    _, last = train_plain(200, 300, checkpoint)
    print(f"torch: {first:.5f} at step 100; hostdev: {then:.5f} at step 200; torch again: {last:.5f} at step 300")
    print(f"torch alone: {straight:.5f} at step 300")
    return straight, last


if __name__ == "__main__":
    main()
