"""Plain torch references of whole training runs: dense tensors as tables, and optimizers written out.

A reference takes initial values, hyperparameters and the dense network from hostdev; lookups,
gradients of rows and updates are torch's. With `network="paper"`, it takes that of `tests.models.reference`.

On the CPU a model without bags over host tables comes to the twin's bits, as the twin does the same operations in the
same order: gradients are summed in order of occurrence, and updates are those of the optimizers' docstrings. Anything
less, and 50 steps of Adam make 1e-3 of one rounding: where gradients are near 0, its steps follow their signs.
"""

import numpy as np
import torch
import torch.nn.functional as F

from hostdev.models import make
from tests.models.reference import NETWORKS


def train_twin(name, schema, batches, dim, seed, **options):
    """Train over batches; return the losses before each update, and a function from a batch to logits float32 [B].

    options  of `Twin`
    """
    twin = Twin(name, schema, dim, seed, **options)
    return [twin.step(batch) for batch in batches], twin.predict


def initial_table(name, spec, seed):
    """The table's initial weights, a tensor [rows, dim]."""
    block = np.empty((spec.rows, 1, spec.dim), np.float32)
    spec.init.fill(block, seed, name, np.empty(0, np.float32))
    return torch.from_numpy(block[:, 0].copy())


class Twin:
    """A model with its tables as dense tensors.

    lr         of the dense layers' Adam; None for the model's own
    optimizer  of the tables, as the model takes it
    network    "module", the model's own, or "paper", the paper's equations in loops, whose rounding differs
    options    others of the model's constructor, such as layers
    """

    def __init__(self, name, schema, dim, seed, *, lr=None, optimizer=None, network="module", **options):
        self.model = make(name, schema, dim, seed=seed, optimizer=optimizer, **options)
        self.name, self.schema = name, schema
        self.paper = network == "paper"
        self.structure = {"structure": options["structure"]} if "structure" in options else {}
        self.tables = {key: initial_table(key, spec, seed).requires_grad_() for key, spec in self.model.tables.items()}
        self.optimizers = {key: spec.optimizer for key, spec in self.model.tables.items()}
        self.slots = {key: initial_slots(self.optimizers[key], table) for key, table in self.tables.items()}
        self.dense = dict(self.model.named_parameters())
        lr = self.model.lr if lr is None else lr
        self.adam = torch.optim.Adam(self.dense.values(), lr=lr, eps=1e-8, fused=True)
        self.steps = 0

    def step(self, batch):
        """Take a step, and return the loss before it."""
        self.steps += 1
        for parameter in (*self.tables.values(), *self.dense.values()):
            parameter.grad = None
        loss = self.loss(self.logits(batch), torch.from_numpy(batch.label), batch.weight)
        loss.backward()
        self.adam.step()
        rows = torch.unique(self.ids(batch))
        with torch.no_grad():
            for key, table in self.tables.items():
                update = UPDATES[type(self.optimizers[key]).__name__]
                update(self.optimizers[key], self.steps, table, self.slots[key], rows, table.grad[rows])
        return loss.item()

    def loss(self, outputs, label, weight):
        if label.dim() == 1 and weight is None and not self.schema.targets.numeric:
            return F.binary_cross_entropy_with_logits(outputs, label)  # in torch's own rounding
        if label.dim() == 1:
            outputs, label = outputs[:, None], label[:, None]
        total = 0
        for name, x, y in zip(self.schema.labels, outputs.unbind(1), label.unbind(1), strict=True):
            if name in self.schema.targets.numeric:
                each = (x - y) ** 2
            else:
                each = F.binary_cross_entropy_with_logits(x, y, reduction="none")
            total = total + (each if weight is None else torch.from_numpy(weight) * each).mean()
        return total

    @torch.no_grad()
    def predict(self, batch):
        return self.logits(batch).numpy()

    def logits(self, batch):
        dense = torch.from_numpy(batch.dense)
        columns = [self.columns(table, batch) for table in self.tables.values()]
        if self.paper:
            return NETWORKS[self.name](self.dense, dense, *columns, **self.structure)
        # The model may as well get the bags' rows among the others: it puts them side by side.
        fields = tuple(torch.stack(found, 1) for found in columns)
        self.model.features = {"fields": None}
        return self.model(dense, {"fields": fields[0] if len(fields) == 1 else fields})

    def columns(self, table, batch):
        """The rows of every field: a list of [B, dim]."""
        found = []
        if self.name == "wide_deep":  # looks dense columns up, too, and multiplies by their values
            for i in range(batch.dense.shape[1]):
                ids = torch.full((len(batch.dense),), i)
                found.append(F.embedding(ids, table) * torch.from_numpy(batch.dense[:, i : i + 1]))
        ids = torch.from_numpy(batch.ids).long()
        found += [F.embedding(ids[:, column], table) for column in range(ids.shape[1])]
        for name in self.schema.bags:
            values, lengths = (torch.from_numpy(part).long() for part in batch.bags[name])
            found.append(F.embedding_bag(values, table, torch.cumsum(lengths, 0) - lengths, mode="mean"))
        return found

    def ids(self, batch):
        """All ids that the batch looks up."""
        dense = np.arange(batch.dense.shape[1] if self.name == "wide_deep" else 0)
        bags = [batch.bags[name][0] for name in self.schema.bags]
        return torch.from_numpy(np.concatenate([dense, batch.ids.ravel(), *bags]).astype(np.int64))


def initial_slots(optimizer, table):
    start = getattr(optimizer, "initial_accum", None)
    kind = type(optimizer).__name__
    if kind == "LazyAdam":
        return {"m": torch.zeros(table.shape), "v": torch.zeros(table.shape)}
    if kind == "FTRL":
        return {"n": torch.full(table.shape, start), "z": torch.zeros(table.shape)}
    if kind == "Adagrad":
        return {"n": torch.full(table.shape, start)}
    if kind == "RowWiseAdam":
        return {"m": torch.zeros(table.shape), "v": torch.zeros((len(table), 1))}
    if kind == "Momentum":
        return {"b": torch.zeros(table.shape)}
    if kind == "RowWiseAdagrad":
        return {"n": torch.full((len(table), 1), start)}
    return {}


def root(x):
    """The correctly rounded square root; torch's own of float32 on the CPU is an ulp off in a fifth of all cases."""
    return x.double().sqrt().float()


def lazy_adam(o, step, table, slots, rows, g):
    m, v = slots["m"], slots["v"]
    rest1, rest2 = (float(1 - torch.tensor(beta)) for beta in (o.beta1, o.beta2))  # in float32: both add up to 1 there
    m[rows] = o.beta1 * m[rows] + rest1 * g
    v[rows] = o.beta2 * v[rows] + rest2 * (g * g)
    numerator = o.beta1 * m[rows] + rest1 * g if o.nesterov else m[rows]
    lr = o.lr * (1 - o.beta2**step) ** 0.5 / (1 - o.beta1**step)
    table[rows] -= lr * numerator / (root(v[rows]) + o.eps)


def ftrl(o, step, table, slots, rows, g):
    assert o.lr_power == -0.5
    old, w = slots["n"][rows], table[rows]
    new = old + g * g
    z = slots["z"][rows] + (g - (root(new) - root(old)) / o.lr * w)
    w = (torch.sign(z) * o.l1 - z) / (root(new) / o.lr + 2 * o.l2)
    table[rows] = torch.where(z.abs() > o.l1, w, torch.zeros_like(w))
    slots["n"][rows], slots["z"][rows] = new, z


def sgd(o, step, table, slots, rows, g):
    table[rows] -= o.lr * g


def adagrad(o, step, table, slots, rows, g):
    slots["n"][rows] += g * g
    table[rows] -= o.lr * g / (root(slots["n"][rows]) + o.eps)


def mean_square(g):
    lanes = [torch.zeros(len(g)) for _ in range(16)]
    for column in range(g.shape[1]):
        lanes[column % 16] = lanes[column % 16] + g[:, column] * g[:, column]
    total = torch.zeros(len(g))
    for lane in lanes:
        total = total + lane
    return (total / g.shape[1])[:, None]


def row_wise_adagrad(o, step, table, slots, rows, g):
    slots["n"][rows] += mean_square(g)
    table[rows] -= o.lr * g / (root(slots["n"][rows]) + o.eps)


def row_wise_adam(o, step, table, slots, rows, g):
    m, v = slots["m"], slots["v"]
    rest1, rest2 = (float(1 - torch.tensor(beta)) for beta in (o.beta1, o.beta2))
    v[rows] = o.beta2 * v[rows] + rest2 * mean_square(g)
    m[rows] = o.beta1 * m[rows] + rest1 * g
    lr = o.lr * (1 - o.beta2**step) ** 0.5 / (1 - o.beta1**step)
    table[rows] -= lr * m[rows] / (root(v[rows]) + o.eps)


def momentum(o, step, table, slots, rows, g):
    b = slots["b"]
    b[rows] = o.momentum * b[rows] + g
    table[rows] -= o.lr * (g + o.momentum * b[rows] if o.nesterov else b[rows])


UPDATES = {
    "LazyAdam": lazy_adam,
    "FTRL": ftrl,
    "SGD": sgd,
    "Adagrad": adagrad,
    "RowWiseAdagrad": row_wise_adagrad,
    "RowWiseAdam": row_wise_adam,
    "Momentum": momentum,
}
