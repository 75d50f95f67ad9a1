"""Models of one's own, as a user would write them, for `--model tests.own_models:Class`."""

import numpy as np
import torch
from torch import nn

from hostdev import SGD, Bag, Feature, LazyAdam, TableSpec
from hostdev.core.pieces import Piece, run
from hostdev.models.deepfm import DeepFM


class ThreeTables(nn.Module):
    """Three groups of tables: the first column's, with a first-order weight beside it; the second's; and all others'.

    The others are bags with weights, as the bags of the data are. Ids are those of the data, so a table has all rows.
    """

    lr = 1e-3
    default_dim = 8

    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__()
        torch.manual_seed(seed)
        self.schema = schema
        made = lambda: optimizer or LazyAdam(lr=1e-2)  # noqa: E731
        self.tables = {
            "first": TableSpec(schema.rows, dim, made()),
            "weight": TableSpec(schema.rows, 1, SGD(lr=0.1)),
            "second": TableSpec(schema.rows, dim, made()),
            "others": TableSpec(schema.rows, 2 * dim, made()),
        }
        self.features = {
            "first": Feature(("first", "weight")),
            "second": Feature("second"),
            "others": Feature("others", pooling="sum"),
            **{f"bag {name}": Feature("others", pooling="mean") for name in schema.bags},
        }
        inputs = 2 * dim + (1 + len(schema.bags)) * 2 * dim + len(schema.dense)
        self.top = nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 1))

    def ids(self, batch):
        rest = batch.ids[:, 2:]
        weights = np.broadcast_to(1 / np.arange(1, rest.shape[1] + 1, dtype=np.float32), rest.shape)
        return {
            "first": batch.ids[:, 0],
            "second": batch.ids[:, 1],
            "others": Bag(rest, weights=weights),
            **{f"bag {name}": Bag(*batch.bags[name]) for name in self.schema.bags},
        }

    def forward(self, dense, rows):
        return run(self.pieces(), dense, rows)

    def pieces(self):
        first, relu, last = self.top
        return [
            Piece("input", self._input),
            Piece("top.0", lambda by, value: (by, first(value)), (first,)),
            Piece("top.1", lambda by, value: (by, relu(value))),
            Piece("output", lambda by, value: by + last(value).squeeze(1), (last,)),
        ]

    def _input(self, dense, rows):
        first, weight = rows["first"]
        others = [rows[name] for name in self.features if name not in ("first", "second")]
        return weight.squeeze(1), torch.cat([first, rows["second"], *others, dense], 1)


class FewRows(nn.Module):
    """A table of two rows, one of four, and a bag feature that few samples have ids of."""

    lr = 1e-3
    default_dim = 4
    rare = 13  # of so many users one

    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__()
        torch.manual_seed(seed)
        made = lambda: optimizer or LazyAdam(lr=1e-2)  # noqa: E731
        rows = {"two": 2, "four": 4, "rest": schema.rows}
        self.tables = {name: TableSpec(count, dim, made()) for name, count in rows.items()}
        self.features = {
            "two": Feature("two"),
            "four": Feature("four", pooling="mean"),
            "item": Feature("rest"),
            "rare": Feature("rest", pooling="sum"),
        }
        self.top = nn.Linear(4 * dim + len(schema.dense), 1)

    def ids(self, batch):
        user, item = batch.ids[:, 0], batch.ids[:, 1]
        has = user % self.rare == 0
        return {
            "two": user % 2,
            "four": Bag(np.stack([user % 4, item % 4], 1)),
            "item": item,
            "rare": Bag(item[has], lengths=has.astype(np.int64)),
        }

    def forward(self, dense, rows):
        return self.top(torch.cat([*(rows[name] for name in self.features), dense], 1)).squeeze(1)


class Dropout(DeepFM):
    """Layers that draw from torch's generator in every step, and when they are made."""

    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__(schema, dim, seed=seed, optimizer=optimizer, layers=(16, 8), dropout=0.5)


class FailsInTheEnd(DeepFM):
    """A network whose last piece fails, when it computes something."""

    def pieces(self):
        *pieces, last = super().pieces()
        return [*pieces, last._replace(call=self._fail)]

    def _fail(self, base, deep):
        if type(base) is torch.Tensor:
            raise ValueError("the end of the network fails")
        return base + deep.sum(1)


class Tied(DeepFM):
    """A network whose first and last hidden layers share their weights."""

    def __init__(self, schema, dim, *, seed, optimizer=None):
        width = (len(schema.dense) + len(schema.columns)) * dim
        super().__init__(schema, dim, seed=seed, optimizer=optimizer, layers=(width, 8, width, width))
        self.deep[6].weight = self.deep[0].weight


class Overflowing(DeepFM):
    """The gradient of the last layer's weights, and no other, is infinite."""

    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__(schema, dim, seed=seed, optimizer=optimizer, layers=(16, 8))
        self.deep[-1].weight.register_hook(lambda grad: grad * float("inf"))


class Unused(DeepFM):
    """A value that goes by, and that nobody uses in the end; what it is made of takes no step. And frozen weights."""

    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__(schema, dim, seed=seed, optimizer=optimizer, layers=(8, 8, 8))
        self.aside = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.full((), 0.5), requires_grad=False)

    def pieces(self):
        first, *pieces, last = super().pieces()
        beside = [
            piece._replace(call=lambda base, deep, aside, call=piece.call: (*call(base, deep), aside))
            for piece in pieces
        ]
        beside[0] = beside[0]._replace(holds=(*beside[0].holds, self.frozen))
        return [
            first._replace(call=lambda *given: self._with_aside(first.call(*given)), holds=(*first.holds, self.aside)),
            *beside,
            last._replace(
                call=lambda base, deep, aside: last.call(base * self.frozen, deep), holds=(*last.holds, self.frozen)
            ),
        ]

    def _with_aside(self, given):
        return (*given, given[0] * self.aside)
