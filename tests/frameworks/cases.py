"""A model of two tables as users of frameworks write it, and the plain hostdev loop that trainers must equal."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hostdev

SAMPLES, BATCH = 250, 16  # 16 batches, the last one of 10 samples


def data():
    random = torch.Generator().manual_seed(0)
    user, film = (torch.randint(n, (SAMPLES,), generator=random) for n in (50, 80))
    return TensorDataset(user, film, torch.randint(2, (SAMPLES,), generator=random).float())


def loader(size=BATCH):
    return DataLoader(data(), batch_size=size)


def ids(batch):
    return {"user": batch[0], "film": batch[1]}


def make_runtime(depth=2, cache=None):
    tables = [
        hostdev.HostTable(n, 8, hostdev.LazyAdam(lr=0.05), name=k, seed=1) for k, n in (("user", 50), ("film", 80))
    ]
    return hostdev.Runtime({table.name: table for table in tables}, device="cpu", depth=depth, cache=cache)


def make_top():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))


def loss_of(top, batch, rows):
    logits = top(torch.cat([rows["user"], rows["film"]], 1)).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch[2])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


def weights(runtime):
    """Return the tables' state after all steps."""
    runtime.write_back()
    return [table.weights.tobytes() for table in runtime.tables.values()]


def plain(epochs, *, accumulate=1, clip=None, value=None, batches=None):
    """Return the losses, the weights and the numbers of stepped batches of a plain loop."""
    runtime, top = make_runtime(), make_top()
    optimizer, losses, steps = adam(top.parameters()), [], []
    for _ in range(epochs):
        for batch, rows in runtime.train(list(loader())[:batches], ids=ids, accumulate=accumulate):
            loss = loss_of(top, batch, rows)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if rows.is_due:
                every = [*top.parameters(), *rows.parameters()]
                if clip is not None:
                    nn.utils.clip_grad_norm_(every, clip)
                if value is not None:
                    nn.utils.clip_grad_value_(every, value)
                optimizer.step()
                optimizer.zero_grad()
                steps.append(len(losses))
    return losses, weights(runtime), steps
