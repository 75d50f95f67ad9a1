"""Predict who likes which film with Lightning's Trainer and the tables on hostdev.

The differences from a module over torch's embeddings: a batch is (batch, rows), the loaders are the runtime's, and a
plugin saves the tables with Lightning's checkpoints.

python examples/lightning.py [--small]
"""

import sys
import tempfile
from pathlib import Path

import films
import torch
from torch import nn
from torch.utils.data import DataLoader

import hostdev
from hostdev.frameworks.lightning import checkpoint_io

# Remove this folder from the path: this file would hide the package lightning.
sys.path[:] = [one for one in sys.path if Path(one).resolve() != Path(__file__).resolve().parent]
import lightning  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402

DIM, BATCH, ACCUMULATE = 16, 256, 2


class Liking(lightning.LightningModule):
    """Predicts whether a user likes a film; the tables belong to the runtime, not to the module's state."""

    def __init__(self, runtime: hostdev.Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self.layers = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))
        self.scores: list[torch.Tensor] = []
        self.labels: list[torch.Tensor] = []

    def forward(self, rows) -> torch.Tensor:
        """Return logits [B]."""
        user, film, genre = rows["user"], rows["film"], rows["genre"]
        return (user * (film + genre)).sum(1) + self.layers(torch.cat([user, film, genre], 1)).squeeze(1)

    def training_step(self, item, number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        (_, _, _, liked, _), rows = item
        return nn.functional.binary_cross_entropy_with_logits(self(rows), liked)

    def validation_step(self, item, number: int) -> None:
        """Keep the scores and labels of a batch."""
        (_, _, _, liked, _), rows = item
        self.scores.append(self(rows))
        self.labels.append(liked)

    def on_validation_epoch_end(self) -> None:
        """Log the AUC."""
        self.auc = films.auc(*(torch.cat(each).float().cpu().numpy() for each in (self.scores, self.labels)))
        self.scores, self.labels = [], []
        self.log("auc", self.auc, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the dense layers; the tables have their own."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def ids(batch) -> dict[str, torch.Tensor]:
    """Return the ids of a batch by feature."""
    return {"user": batch[0], "film": batch[1], "genre": batch[2]}


def make_runtime(data: films.Films) -> hostdev.Runtime:
    """Return a runtime with the tables."""
    tables = {k: hostdev.HostTable(n, DIM, hostdev.LazyAdam(lr=5e-3), name=k, seed=1) for k, n in data.sizes.items()}
    return hostdev.Runtime(tables)


def main(folder: str | None = None, epochs: int = 4, resume: str | None = None, **size: int) -> Liking:
    """Train, from the checkpoint `resume` if it is given; keep the best checkpoint with its tables."""
    lightning.seed_everything(0)
    data = films.make(**size)
    runtime = make_runtime(data)
    module = Liking(runtime)
    training = DataLoader(data.events("train"), batch_size=BATCH)
    validation = DataLoader(data.events("test"), batch_size=1024)
    best = ModelCheckpoint(folder or tempfile.mkdtemp(), monitor="auc", mode="max", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        devices=1,
        callbacks=[best, EarlyStopping("auc", mode="max")],
        plugins=[checkpoint_io(runtime)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        runtime.train_loader(training, ids=ids, accumulate=ACCUMULATE),
        runtime.predict_loader(validation, ids=ids),
        ckpt_path=resume,
    )
    print(f"AUC {module.auc:.4f} after epoch {trainer.current_epoch}, the best {best.best_model_score:.4f}")
    return module


if __name__ == "__main__":
    main(**films.size(__doc__))
