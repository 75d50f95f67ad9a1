"""Predict who likes which film, in a loop with Hugging Face accelerate and the tables on hostdev.

The differences from a loop over torch's embeddings: `runtime.train` wraps the prepared loader and also accumulates, the
rows are clipped with the parameters, and two hooks save and load the tables with accelerate's state.

python examples/accelerate.py [--small]
"""

import sys
import tempfile
from pathlib import Path

import films
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import hostdev

# Remove this folder from the path: this file would hide the package accelerate.
sys.path[:] = [one for one in sys.path if Path(one).resolve() != Path(__file__).resolve().parent]
from accelerate import Accelerator  # noqa: E402

DIM, BATCH, ACCUMULATE = 16, 256, 3


class Liking(nn.Module):
    """Predicts whether a user likes a film."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, film: torch.Tensor, genre: torch.Tensor) -> torch.Tensor:
        """Return logits [B] for rows, each [B, DIM]."""
        return (user * (film + genre)).sum(1) + self.layers(torch.cat([user, film, genre], 1)).squeeze(1)


def ids(batch) -> dict[str, torch.Tensor]:
    """Return the ids of a batch by feature."""
    return {"user": batch[0], "film": batch[1], "genre": batch[2]}


def make_runtime(data: films.Films) -> hostdev.Runtime:
    """Return a runtime with the tables."""
    tables = {k: hostdev.HostTable(n, DIM, hostdev.LazyAdam(lr=5e-3), name=k, seed=1) for k, n in data.sizes.items()}
    return hostdev.Runtime(tables)


def main(folder: str | None = None, epochs: int = 4, resume: str | None = None, **size: int) -> list[float]:
    """Train for some epochs, from the state `resume` if it is given; save the state, and return the losses."""
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE)
    torch.manual_seed(0)
    data = films.make(**size)
    runtime = make_runtime(data)
    model = Liking()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    training = DataLoader(data.events("train"), batch_size=BATCH)
    model, optimizer, training = accelerator.prepare(model, optimizer, training)
    accelerator.register_save_state_pre_hook(lambda models, weights, to: runtime.save(Path(to) / "tables"))
    accelerator.register_load_state_pre_hook(lambda models, at: runtime.load(Path(at) / "tables"))
    if resume is not None:
        accelerator.load_state(resume)
    losses = []
    for _ in range(epochs):
        for (*_, liked, _), rows in runtime.train(training, ids=ids, accumulate=ACCUMULATE):
            with accelerator.accumulate(model):
                logits = model(rows["user"], rows["film"], rows["genre"])
                loss = nn.functional.binary_cross_entropy_with_logits(logits, liked)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_([*model.parameters(), *rows.parameters()], 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.save_state(folder or tempfile.mkdtemp())
    scores, labels = [], []
    for (*_, liked, _), rows in runtime.predict(DataLoader(data.events("test"), batch_size=1024), ids=ids):
        with torch.no_grad():
            scores.append(model(rows["user"], rows["film"], rows["genre"]).float().cpu().numpy())
        labels.append(liked.numpy())
    print(f"AUC {films.auc(np.concatenate(scores), np.concatenate(labels)):.4f} after {epochs} epochs")
    return losses


if __name__ == "__main__":
    main(**films.size(__doc__))
