"""Ratings of a known logistic model, as CSV: what the best possible model reaches is known.

    python -m tests.data.movies FILE [--rows N] [--users N] [--items N] [--seed N]

Columns: user, item, age, history (up to five items that the user has seen before, by spaces), genres (of the item, by
bars), time (seconds, ascending), liked. A row's logit is a sum: an effect of the user, one of the item, the mean of the
genres', the mean of the items' in the history (the same effects), a slope of the age. Users and items follow Zipf's
law.
"""

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hostdev.train.scores import auc

GENRES = ("Action", "Animation", "Children's", "Comedy", "Crime", "Drama", "Fantasy", "Film-Noir", "Horror", "War")
COLUMNS = ("user", "item", "age", "history", "genres", "time", "liked")


class Movies(NamedTuple):
    """The rows by column, and the true probability of each label."""

    columns: dict[str, list]
    probability: np.ndarray  # float64 [n]

    @property
    def label(self):
        return np.array(self.columns["liked"], np.float32)

    def best_auc(self, rows=slice(None)):
        """The AUC of the true probabilities, which no model exceeds but by luck."""
        return auc(self.probability[rows], self.label[rows])

    def write_csv(self, path):
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            lists = {"history": " ", "genres": "|"}
            values = [[lists[name].join(v) if name in lists else v for v in self.columns[name]] for name in COLUMNS]
            writer.writerows(zip(*values, strict=True))
        return path


def make(rows=40_000, users=500, items=300, seed=1):
    """Draw a model and rows of it."""
    rng = np.random.default_rng(seed)
    of_user, of_item, of_genre = rng.normal(0, 1, users), rng.normal(0, 1, items), rng.normal(0, 1, len(GENRES))
    genres = [rng.choice(len(GENRES), rng.integers(1, 4), replace=False) for _ in range(items)]
    mean_genre = np.array([of_genre[of].mean() for of in genres])
    user, item = _zipf(rng, users, rows), _zipf(rng, items, rows)
    age = rng.integers(15, 70, rows)
    history = [rng.choice(items, rng.integers(0, 6)) for _ in range(rows)]
    seen = np.array([of_item[of].mean() if len(of) else 0.0 for of in history])
    logit = -0.3 + of_user[user] + of_item[item] + mean_genre[item] + seen + (age - 42) / 40
    probability = 1 / (1 + np.exp(-logit))
    columns = {
        "user": [f"u{i}" for i in user],
        "item": [f"m{i:04}" for i in item],
        "age": age.tolist(),
        "history": [[f"m{i:04}" for i in of] for of in history],
        "genres": [[GENRES[g] for g in genres[i]] for i in item],
        "time": np.cumsum(rng.integers(1, 1000, rows)).tolist(),
        "liked": (rng.random(rows) < probability).astype(int).tolist(),
    }
    return Movies(columns, probability)


def _zipf(rng, n, rows):
    share = 1 / np.arange(1, n + 1)
    return rng.choice(n, rows, p=share / share.sum())


def main():
    parser = argparse.ArgumentParser(description="Write ratings of a known logistic model as CSV.")
    parser.add_argument("file", type=Path)
    for name, default in (("rows", 200_000), ("users", 5000), ("items", 2000), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    movies = make(arguments.rows, arguments.users, arguments.items, arguments.seed)
    movies.write_csv(arguments.file)
    last = slice(arguments.rows * 9 // 10, None)
    print(
        f"{arguments.file}: {arguments.rows:,} rows, best possible AUC {movies.best_auc():.4f}, of the last tenth "
        f"{movies.best_auc(last):.4f}"
    )


if __name__ == "__main__":
    main()
