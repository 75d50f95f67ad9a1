"""From a CSV file with users, items, histories and genres to batches of which a model learns what there is to learn."""

import numpy as np
import pytest

from hostdev.data import manifest
from hostdev.data.preprocess.build import Options
from hostdev.data.shards import ShardReader
from hostdev.train.scores import auc
from tests.data import movies, twins

CUT = 0.9


@pytest.fixture(scope="module")
def made():
    return movies.make(40_000)


@pytest.fixture(scope="module")
def data(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("movies")
    path = made.write_csv(folder / "movies.csv")
    last = made.columns["time"][int(CUT * len(made.label)) - 1]
    twins.build_table(
        path,
        folder / "data",
        label="liked",
        numeric=("age",),
        categorical=("user", "item"),
        bags=(("history", " "), ("genres", "|")),
        share=(("history", "item"),),
        test_after=("time", str(last)),
        options=Options(threshold=1, dense="standard", test_fraction=None, rows_per_shard=9000),
    )
    return folder / "data"


def test_the_best_possible_auc(made):
    """Beside the labels' noise there is nothing that the probabilities do not know."""
    assert 0.75 < made.best_auc() < 0.9
    rng = np.random.default_rng(2)
    worse = [auc(made.probability + rng.normal(0, 0.05, len(made.label)), made.label) for _ in range(3)]
    assert max(worse) < made.best_auc()
    again = movies.make(1000)
    assert again.columns == movies.make(1000).columns


def test_the_csv_is_what_was_made(made, data):
    rows = twins.read(data, "train")
    assert len(rows) == int(CUT * len(made.label))
    names = [value for _, value, _ in twins.vocabulary(data)]
    schema = manifest.read(data).schema
    assert schema.ids == ("user", "item")
    assert schema.bags == ("history", "genres")
    assert [space.name for space in schema.spaces] == ["user", "item", "genres"]
    for row in range(0, len(rows), 371):
        label, _, (user, item), (history, genres) = rows[row]
        expected = {name: values[row] for name, values in made.columns.items()}
        assert label == expected["liked"]
        assert names[user] in (expected["user"], None)
        assert names[item] == expected["item"]
        assert [names[value] for value in history] == expected["history"]
        assert [names[value] for value in genres] == expected["genres"]


class Logistic:
    """A weight for each id, a mean over each bag, a weight for each number: Adagrad, in numpy."""

    def __init__(self, schema):
        self.ids, self.dense = np.zeros(schema.rows), np.zeros(len(schema.dense) + 1)
        self.squares = np.full(schema.rows, 1e-6), np.full(len(schema.dense) + 1, 1e-6)

    def uses(self, batch):
        """Ids, the row and the factor of each use."""
        n = len(batch)
        parts = [(ids, np.arange(n), np.ones(n)) for ids in batch.ids.T]
        for values, lengths in batch.bags.values():
            parts.append((values, np.repeat(np.arange(n), lengths), np.repeat(1 / np.maximum(lengths, 1), lengths)))
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    def logits(self, batch):
        ids, rows, factors = self.uses(batch)
        dense = np.column_stack([batch.dense, np.ones(len(batch))])
        return dense @ self.dense + np.bincount(rows, self.ids[ids] * factors, len(batch))

    def step(self, batch, lr=0.1):
        error = 1 / (1 + np.exp(-self.logits(batch))) - batch.label
        ids, rows, factors = self.uses(batch)
        dense = np.column_stack([batch.dense, np.ones(len(batch))]).T @ error / len(batch)
        for weights, squares, grad in (
            (self.ids, self.squares[0], np.bincount(ids, error[rows] * factors, len(self.ids)) / len(batch)),
            (self.dense, self.squares[1], dense),
        ):
            squares += grad * grad
            weights -= lr * grad / np.sqrt(squares)


@pytest.mark.parametrize("without", [None, "history"])
def test_a_logistic_regression_comes_near_the_best_possible_auc(made, data, without):
    found = manifest.read(data)

    def batches(split, **order):
        for batch in ShardReader(data, found, split).batches(500, **order):
            if without is not None:  # which takes away what only that bag says; an item has its genres always
                values, lengths = batch.bags[without]
                batch.bags[without] = values[:0], np.zeros_like(lengths)
            yield batch

    model = Logistic(found.schema)
    for epoch in range(6):
        for batch in batches("train", seed=1, epoch=epoch):
            model.step(batch)
    scores = np.concatenate([model.logits(batch) for batch in batches("test")])
    labels = np.concatenate([batch.label for batch in batches("test")])
    best = made.best_auc(slice(int(CUT * len(made.label)), None))
    reached = auc(scores, labels)
    if without is None:
        assert best - 0.02 < reached <= best + 0.005
    else:
        assert reached < best - 0.02
