"""A model over tables in four groups, as a user writes it; its plain torch twin; and what of both must be equal."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hostdev
from hostdev import DeviceTable, Feature, HostTable, Runtime

DIM = 4
ROWS = {"users": 40, "items": 60, "first": 60, "words": 30}
COLUMNS = {"users": DIM, "items": DIM, "first": 1, "words": DIM}
OPTIMIZERS = {
    "users": lambda: hostdev.LazyAdam(lr=0.01),
    "items": lambda: hostdev.Adagrad(lr=0.1),
    "first": lambda: hostdev.FTRL(),
    "words": lambda: hostdev.RowWiseAdagrad(lr=0.1),
}
CACHES = [None, "20%", {"items": "100%", "users": hostdev.CacheSpec(5, "lru")}]
BF16 = ("users", "items", "words")  # "first", which shares its ids with "items", stays float32
CPU = torch.device("cpu")
MODES = [(0, None), (0, "20%"), (3, None), (2, "20%"), (4, CACHES[2])]  # depth and cache
overlapped = pytest.mark.parametrize(
    ("depth", "cache"), [MODES[0], *(pytest.param(*mode, marks=pytest.mark.drawn) for mode in MODES[1:-1]), MODES[-1]]
)


class BodyError(Exception):
    """Of a loop's body."""


def wanted_of(device, batches):
    """What a serial loop without caches comes to."""
    return Case(device, options={"depth": 0}).train(batches).state()


def sgd():
    return hostdev.SGD(lr=0.3)


def tables_of(device, optimizer=None, on_device=(), bf16=(), seed=3):
    """Tables by name, those in `on_device` there; those in `bf16` store bfloat16, "items" its slots in 8 bits."""
    made = {}
    for name, rows in ROWS.items():
        own = optimizer() if optimizer else OPTIMIZERS[name]()
        dtype = "bf16" if name in bf16 else "fp32"
        arguments = {"name": name, "seed": seed, "init": hostdev.Normal(0.5), "dtype": dtype}
        arguments["slots"] = "8bit" if name == "items" and name in bf16 else dtype
        if name in on_device:
            made[name] = DeviceTable(rows, COLUMNS[name], own, device, **arguments)
        else:
            made[name] = HostTable(rows, COLUMNS[name], own, **arguments)
    return made


def features_of(tables):
    """A feature with one table, one with two, and bags that share one of these."""
    return {
        "user": tables["users"],
        "item": (tables["items"], tables["first"]),
        "history": Feature(tables["items"], pooling="mean", padding=-1),
        "words": Feature(tables["words"], pooling="sum"),
    }


def batches_of(count, seed=0, size=12):
    """Batches that share many of their ids, as dicts with the features' names."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lengths = rng.integers(0, 4, size)
        words = rng.integers(0, ROWS["words"], lengths.sum())
        history = rng.integers(-1, ROWS["items"], (size, 3))
        made.append(
            {
                "user": rng.integers(0, ROWS["users"], size).astype(np.int32),
                "item": rng.integers(0, ROWS["items"], size),
                "history": history,
                "words": hostdev.Bag(words, lengths=lengths, weights=rng.random(len(words), np.float32)),
                "label": (rng.random(size) < 0.5).astype(np.float32),
            }
        )
    return made


class Model(nn.Module):
    """Logits [B] of rows by feature."""

    def __init__(self, seed=5):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.top = nn.Linear(4 * DIM, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) / 4

    def forward(self, rows):
        vector, first = rows["item"]
        hidden = torch.cat([rows["user"], vector, rows["history"], rows["words"]], 1)
        return self.top(hidden).squeeze(1) + first.squeeze(1)


def loss_of(model, rows, label):
    return F.binary_cross_entropy_with_logits(model(rows), label)


def send(batch):
    return torch.from_numpy(batch["label"])


@dataclass
class Case:
    """What a user has made before the loop."""

    device: torch.device = CPU
    optimizer: object = None
    on_device: tuple = ()
    bf16: tuple = ()
    seed: int = 3
    options: dict = field(default_factory=dict)  # of the runtime
    adam: dict = field(default_factory=dict)  # of the dense side's optimizer
    tables: dict = None
    runtime: Runtime = None
    losses: list = field(default_factory=list)

    def __post_init__(self):
        self.tables = self.tables or tables_of(self.device, self.optimizer, self.on_device, self.bf16, self.seed)
        self.runtime = Runtime(features_of(self.tables), device=self.device, **self.options)
        self.model = Model().to(self.device)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.02, **self.adam)

    def loop(self, batches, **options):
        if not options.get("background"):
            options = {"read_ahead": True, **options}  # no generator of the program's own is used
        return self.runtime.train(batches, ids=ids, send=send, **options)

    def step(self, label, rows):
        """The body of a loop: one step."""
        loss = loss_of(self.model, rows, label)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        self.losses.append(loss.detach())

    def train(self, batches, **options):
        for label, rows in self.loop(batches, **options):
            self.step(label, rows)
        return self

    def state(self):
        """Everything that is learned, as bytes by name."""
        return tables_state(self.tables.values()) | dense_state(self.model, self.adam)


def ids(batch):
    return {name: batch[name] for name in ("user", "item", "history", "words")}


def tables_state(tables):
    state = {}
    for table in tables:
        state[table.name, "step"] = table.step
        for name, values in {"weights": table.weights, **table.slots}.items():
            state[table.name, name] = bits(values)
    return state


def dense_state(model, optimizer):
    state = {("dense", name): bits(parameter) for name, parameter in model.named_parameters()}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        for key, value in optimizer.state.get(parameter, {}).items():
            state["dense", name, key, number] = bits(torch.as_tensor(value))
    return state


def bits(values):
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    return np.ascontiguousarray(values).tobytes()


def differing(one, other):
    """The names whose bits differ; [] where two states are equal."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


class Twin:
    """The rows of the same features from whole tables as parameters of torch's own."""

    def __init__(self, tables):
        self.tables = {name: nn.Parameter(torch.tensor(weights_of(table))) for name, table in tables.items()}

    def parameters(self):
        return list(self.tables.values())

    def __call__(self, batch):
        words = batch["words"]
        weights, offsets = torch.from_numpy(words.weights), torch.tensor(np.cumsum([0, *words.lengths[:-1]]))
        item = torch.from_numpy(batch["item"])
        padded = torch.from_numpy(np.where(batch["history"] < 0, ROWS["items"], batch["history"]))
        with_padding = torch.cat([self.tables["items"], torch.zeros(1, DIM)])
        return {
            "user": F.embedding(torch.from_numpy(batch["user"]), self.tables["users"]),
            "item": (F.embedding(item, self.tables["items"]), F.embedding(item, self.tables["first"])),
            "history": F.embedding_bag(padded, with_padding, mode="mean", padding_idx=ROWS["items"]),
            "words": F.embedding_bag(
                torch.from_numpy(words.values), self.tables["words"], offsets, mode="sum", per_sample_weights=weights
            ),
        }

    def assert_close(self, tables):
        for name, table in tables.items():
            np.testing.assert_allclose(
                weights_of(table), self.tables[name].detach(), rtol=1e-4, atol=1e-5, err_msg=name
            )


def weights_of(table):
    weights = table.weights
    return weights.cpu().numpy().copy() if isinstance(weights, torch.Tensor) else weights.copy()


def threads():
    """The names of the threads of open loops."""
    names = {thread.name for thread in threading.enumerate()}
    return names & {"hostdev-reader", "hostdev-fetcher", "hostdev-updater"}
