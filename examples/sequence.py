"""Predict the next film of a history, by self-attention over the unpooled rows of its films (SASRec).

The file has the same program in plain torch and on hostdev, starting from the same rows. The loader draws negatives for
each batch from its own generator.

python examples/sequence.py [--small]
"""

import films
import numpy as np
import torch
from torch import nn

import hostdev

DIM, BATCH, LR = 32, 64, 5e-3


class Attention(nn.Module):
    """Computes a vector for each position in a history, from the films up to that position."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.place = nn.Parameter(0.1 * torch.randn(length, DIM))
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        """Return the vectors [B, L, DIM] for the rows of films [B, L, DIM]."""
        length = history.shape[1]
        return self.layer(history + self.place[:length], src_mask=self.mask[:length, :length], is_causal=True)


def loss_of(hidden: torch.Tensor, following: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Return the loss of telling each next film from a random one; all arguments are [B, L, DIM]."""
    logits = torch.stack([(hidden * following).sum(2), (hidden * negative).sum(2)])
    wanted = torch.zeros_like(logits)
    wanted[0] = 1
    return nn.functional.binary_cross_entropy_with_logits(logits, wanted)


def batches(data: films.Films, epochs: int):
    """Yield history, following and negative, each int64 [B, L]."""
    random = torch.Generator().manual_seed(0)
    film = torch.from_numpy(data.film[:, :-1])
    for _ in range(epochs):
        for users in torch.randperm(len(film), generator=random).split(BATCH):
            history, following = film[users, :-1], film[users, 1:]
            yield {
                "history": history,
                "following": following,
                "negative": torch.randint(len(data.genre), history.shape, generator=random),
            }


def make_table(data: films.Films) -> hostdev.HostTable:
    """Make the table of films, which all three features share."""
    return hostdev.HostTable(
        len(data.genre), DIM, hostdev.LazyAdam(lr=LR), name="film", init=hostdev.Normal(0.1), seed=1
    )


def recall(data: films.Films, hidden: torch.Tensor, film: torch.Tensor) -> float:
    """Return recall@20 of each user's last film, from the vectors [U, L, DIM] of the films before it."""
    history = torch.from_numpy(data.film[:, 1:-1])
    return films.recall(hidden[:, -1] @ film.T, torch.from_numpy(data.film[:, -1]), history)


def train_torch(data: films.Films, epochs: int) -> float:
    """Train in plain torch, and return recall@20."""
    film = films.same_rows(nn.Embedding(len(data.genre), DIM, sparse=True), make_table(data))
    torch.manual_seed(0)
    model = Attention(data.film.shape[1] - 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sparse = torch.optim.SparseAdam([film.weight], lr=LR)
    for batch in batches(data, epochs):
        hidden = model(film(batch["history"]))
        loss = loss_of(hidden, film(batch["following"]), film(batch["negative"]))
        optimizer.zero_grad()
        sparse.zero_grad()
        loss.backward()
        optimizer.step()
        sparse.step()
    with torch.no_grad():
        return recall(data, model(film(torch.from_numpy(data.film[:, 1:-1]))), film.weight)


def train_hostdev(data: films.Films, epochs: int, **options) -> float:
    """Train on hostdev, and return recall@20."""
    film = make_table(data)
    runtime = hostdev.Runtime({"history": film, "following": film, "negative": film}, device="cpu", **options)
    torch.manual_seed(0)
    model = Attention(data.film.shape[1] - 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _, rows in runtime.train(batches(data, epochs)):
        hidden = model(rows["history"])
        loss = loss_of(hidden, rows["following"], rows["negative"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    everything = np.arange(len(data.genre))
    rows = runtime.lookup({"history": data.film[:, 1:-1], "following": everything, "negative": everything[:1]})
    with torch.no_grad():
        return recall(data, model(rows["history"]), rows["following"])


def main(epochs: int = 12, **size: int) -> tuple[float, float]:
    """Train both programs, and return their recall@20."""
    data = films.make(**size)
    found = train_torch(data, epochs), train_hostdev(data, epochs)
    print(f"recall@20 {found[1]:.4f}; plain torch {found[0]:.4f}")
    return found


if __name__ == "__main__":
    main(**films.size(__doc__))
