"""What a type checker sees of the public surface; test_typing.py runs mypy over this file, nothing executes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import hostdev
from hostdev.runtime.body_batch import Step
from hostdev.runtime.loaders import PredictLoader, TrainLoader
from hostdev.runtime.loop import PredictLoop, TrainLoop
from hostdev.runtime.rows import Rows, Value
from hostdev.runtime.table_optimizer import TableOptimizer


@dataclass
class Batch:
    user: npt.NDArray[np.int64]
    label: Tensor


def get_ids(batch: Batch) -> dict[str, npt.NDArray[np.int64]]:
    return {"user": batch.user}


def send(batch: Batch) -> Tensor:
    return batch.label


table = hostdev.HostTable(10, 4, hostdev.LazyAdam(), name="users")
runtime = hostdev.Runtime({"user": table, "two": (table, table), "bag": hostdev.Feature(table, pooling="sum")}, depth=1)
loader: list[Batch] = []

for batch, rows in runtime.train(loader, ids=get_ids):
    assert_type(batch, Batch)
    assert_type(rows, Rows)
    assert_type(rows["user"], Tensor | tuple[Tensor, ...])
    assert_type(rows.get("user"), Value | None)
    assert_type(rows.get("user", 0), Value | int)
    assert_type(rows.parameters(), list[Tensor])
    assert_type(rows.reduce([torch.ones(1)]), Tensor | None)
    assert_type(rows.unique("users"), tuple[Tensor, Tensor])
    assert_type(iter(rows), Iterator[str])

for label, rows in runtime.train(loader, ids=lambda one: {"user": one.user}, send=send, accumulate=2, background=True):
    assert_type(label, Tensor)
    assert_type(rows, Rows)

for label, rows in runtime.predict(loader, ids=get_ids, send=send, features=["user"]):
    assert_type(label, Tensor)
    assert_type(rows.is_due, bool)

assert_type(runtime.train(loader, ids=get_ids), TrainLoop[tuple[Batch, Rows]])
assert_type(runtime.train(loader, ids=get_ids, send=send, micro_batches=2, by_step=True), TrainLoop[Step])
assert_type(runtime.predict(loader, ids=get_ids), PredictLoop[tuple[Batch, Rows]])
assert_type(runtime.train_loader(loader, ids=get_ids), TrainLoader[Batch])
assert_type(runtime.predict_loader(loader, ids=get_ids, send=send), PredictLoader[Tensor])
assert_type(runtime.lookup({"user": [1, 2], "bag": ([1], [1])}), dict[str, Value])
assert_type(runtime.optimizer, TableOptimizer)
assert_type(runtime.optimizer.step(), None)
with runtime as same:
    assert_type(same, hostdev.Runtime)

average = hostdev.EMA(table, decay=0.9)
average.update([1, 2])
assert_type(average.lookup([1]), npt.NDArray[np.float32])

predictor = hostdev.Predictor("checkpoints")
assert_type(predictor, hostdev.Predictor)

# Each of these is an error, which mypy must see: else it reports an unused `type: ignore`.
hostdev.Runtime({"user": table}, dpeth=3)  # type: ignore[call-arg]
hostdev.Runtime({"user": table}, staleness=1)  # type: ignore[call-arg]
hostdev.Runtime({"user": 3})  # type: ignore[dict-item]
hostdev.Runtime({"user": table}, cache=0.1)  # type: ignore[arg-type]
runtime.train(loader, ids=get_ids, acumulate=2)  # type: ignore[call-overload]
runtime.predict(loader, id=get_ids)  # type: ignore[call-overload]
runtime.lookup({"user": object()})  # type: ignore[dict-item]
runtime.fit()  # type: ignore[attr-defined]
hostdev.Bag([1], length=[1])  # type: ignore[call-arg]
hostdev.CacheSpec(3, polcy="lru")  # type: ignore[call-arg]
hostdev.EMA(table, decay="0.9")  # type: ignore[arg-type]
