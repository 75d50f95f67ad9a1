"""Synthetic data that the examples share: users with tastes who watch films, drawn from a known model.

The films that a user watches depend on the user's taste, on the previous film and on the films' popularity. Whether a
user likes a film, and watches it to its end, depends on taste alone.
"""

import argparse
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

GENRES = 12


class Films(NamedTuple):
    """The films that users watched, in order of time, and whether they liked and finished them.

    Attributes:
        film: int64 [U, T], the film of each event.
        liked: float32 [U, T], 0 or 1.
        finished: float32 [U, T], 0 or 1.
        genre: int64 [F], the genre of each film.
    """

    film: np.ndarray
    liked: np.ndarray
    finished: np.ndarray
    genre: np.ndarray

    @property
    def sizes(self) -> dict[str, int]:
        """The number of rows of each table."""
        return {"user": len(self.film), "film": len(self.genre), "genre": GENRES}

    def events(self, part: str) -> TensorDataset:
        """Return the user, film, genre, liked and finished of each event; "test" has each user's last two events."""
        at = slice(-2, None) if part == "test" else slice(None, -2)
        film = self.film[:, at]
        user = np.repeat(np.arange(len(film)), film.shape[1])
        columns = user, film.ravel(), self.genre[film.ravel()], self.liked[:, at].ravel(), self.finished[:, at].ravel()
        return TensorDataset(*map(torch.from_numpy, columns))


def make(users: int = 1000, films: int = 400, events: int = 24, seed: int = 0) -> Films:
    """Draw films, users, and the events of each user."""
    rng = np.random.default_rng(seed)
    genre = rng.integers(0, GENRES, films)
    style = rng.standard_normal((GENRES, 4))[genre] + 0.5 * rng.standard_normal((films, 4))
    taste = rng.standard_normal((users, 4))
    effect = rng.normal(0, 0.5, films)  # the quality of each film
    popular = -0.5 * np.log(np.arange(1, films + 1))[rng.permutation(films)]
    wanted = taste @ style.T + popular  # logits [U, F]
    alike = 0.5 * style @ style.T
    watched = np.zeros((users, films), bool)
    film = np.empty((users, events), np.int64)
    for step in range(events):  # the argmax of logits with Gumbel noise is a draw from their softmax
        logits = wanted + (alike[film[:, step - 1]] if step else 0.0) + rng.gumbel(size=(users, films))
        film[:, step] = np.where(watched, -np.inf, logits).argmax(1)
        watched[np.arange(users), film[:, step]] = True
    match = np.take_along_axis(taste @ style.T, film, 1)
    liked = rng.random(film.shape) < sigmoid(match - 2.5 + effect[film])
    finished = rng.random(film.shape) < sigmoid(0.5 * match - 1 + effect[film])
    return Films(film, liked.astype(np.float32), finished.astype(np.float32), genre)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the logistic function."""
    return 1 / (1 + np.exp(-x))


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """Return the share of (positive, negative) pairs that the scores order correctly; ties count half."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]  # ties share their mean rank
    positive, n = label > 0, len(label)
    p = int(positive.sum())
    return float((rank[positive].sum() - p * (p + 1) / 2) / (p * (n - p)))


def recall(scores: torch.Tensor, target: torch.Tensor, seen: torch.Tensor, k: int = 20) -> float:
    """Return the share of users whose next film is among the k best of the films that they have not seen.

    Args:
        scores: float32 [U, F], of every film, so that the top k is exact.
        target: int64 [U], the next film of each user.
        seen: int64 [U, T], the films that each user has seen.
        k: Number of best films.
    """
    best = scores.scatter(1, seen, -torch.inf).topk(k).indices
    return (best == target[:, None]).any(1).float().mean().item()


def same_rows(embedding: torch.nn.Embedding, table) -> torch.nn.Embedding:
    """Copy a table's rows to a torch embedding, so that two programs start equal, and return the embedding."""
    with torch.no_grad():
        embedding.weight.copy_(torch.from_numpy(np.array(table.weights)))
    return embedding


def size(description: str) -> dict[str, int]:
    """Return the arguments of `make` that the command line asks for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--small", action="store_true", help="less data, for a test")
    return {"users": 400, "films": 200} if parser.parse_args().small else {}
