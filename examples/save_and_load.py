"""A loop that saves a checkpoint and resumes from it: python save_and_load.py STEPS."""

import sys
from pathlib import Path

import torch
from torch import nn

import hostdev


def batches(first, last):
    """Yield the batches of steps [first, last); a step has the same batch each time."""
    for number in range(first, last):
        random = torch.Generator().manual_seed(number)
        user, film = (torch.randint(n, (256,), generator=random) for n in (1000, 500))
        yield {"user": user, "film": film, "label": (user % 3 == 0).float()}


def main(steps):
    """Train up to step `steps`, counting the steps of earlier runs."""
    torch.manual_seed(0)  # also seeds the tables' initial values
    users = hostdev.HostTable(1000, 8, hostdev.LazyAdam(lr=0.01), name="users")
    films = hostdev.HostTable(500, 8, hostdev.LazyAdam(lr=0.01), name="films")
    runtime = hostdev.Runtime({"user": users, "film": films}, device="cpu")
    model = nn.Linear(16, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    done = 0
    if any(Path("saved").glob("step-*")):
        extra = runtime.load("saved")  # loads the newest tables with their optimizer state, and returns extra
        model.load_state_dict(extra["model"])
        adam.load_state_dict(extra["adam"])
        done = extra["done"]
        print(f"resumes after step {done}")
    ids = lambda batch: {"user": batch["user"], "film": batch["film"]}  # noqa: E731
    for batch, rows in runtime.train(batches(done, steps), ids=ids):
        logits = model(torch.cat([rows["user"], rows["film"]], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        adam.zero_grad()
        loss.backward()
        adam.step()
        done += 1
        if done % 50 == 0:
            extra = {"model": model.state_dict(), "adam": adam.state_dict(), "done": done}
            runtime.save("saved", extra=extra, wait=False)  # training continues while it is written
    print(f"step {done}: loss {loss.item():.7f}, sum of the users' vectors {users.weights.sum():.5f}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
