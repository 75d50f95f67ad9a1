"""Looking rows up without a loop, and some of the features alone."""

import threading

import numpy as np
import pytest
import torch

import hostdev
from hostdev import Feature, Runtime
from tests.runtime.cases import BF16, Case, batches_of, bits, differing, ids, tables_of, wanted_of


def all_kinds(tables):
    """Features of every kind, with tables that they share."""
    return {
        "user": tables["users"],
        "item": Feature((tables["items"], tables["first"]), dtype=("bfloat16", "float32")),
        "history": Feature(tables["items"], pooling="mean", padding=-1),
        "words": Feature(tables["words"], pooling="sum"),
        "each": Feature(tables["words"]),
    }


def batch_of(size, seed=0):
    batch = {key: value for key, value in batches_of(1, seed, size)[0].items() if key != "label"}
    return batch | {"each": hostdev.Bag(batch["words"].values, weights=batch["words"].weights)}


def bits_of(rows):
    return {
        name: [bits(part.float()) for part in (value if isinstance(value, tuple) else (value,))]
        for name, value in rows.items()
    }


@pytest.mark.parametrize("size", [0, 1, 12, 3000])
@pytest.mark.parametrize("on_device", [(), ("users", "words")], ids=["host", "both sides"])
@pytest.mark.parametrize("bf16", [(), BF16], ids=["fp32", "bf16"])
def test_the_rows_are_those_of_predict(device, size, on_device, bf16):
    """Their bits, shapes and dtypes; for few ids and many, which are looked up in different ways."""
    tables = tables_of(device, on_device=on_device, bf16=bf16)
    runtime = Runtime(all_kinds(tables), device=device)
    batch = batch_of(size)
    [(_, rows)] = runtime.predict([batch])
    for _, rows in runtime.predict([batch]):
        wanted = dict(rows)
    found = runtime.lookup(batch)
    assert list(found) == list(wanted)
    assert bits_of(found) == bits_of(wanted)
    for name, value in wanted.items():
        pairs = zip(value, found[name], strict=True) if isinstance(value, tuple) else [(value, found[name])]
        for one, other in pairs:
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            assert not other.requires_grad
    for value in found.values():  # they are the caller's own
        for part in value if isinstance(value, tuple) else (value,):
            part.add_(1.0)
    assert bits_of(runtime.lookup(batch)) == bits_of(wanted)


def test_no_thread_is_started(monkeypatch):
    case, batch = Case(options={"depth": 2}), ids(batches_of(1)[0])

    def start(self):
        raise AssertionError(self.name)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert case.runtime.lookup(batch)["user"].shape == (12, 4)


@pytest.mark.parametrize(("depth", "cache"), [(0, None), (2, None), (2, "50%")])
def test_within_a_loop_it_sees_every_step(device, depth, cache):
    """And changes nothing: the caches' rows and those on their way to the tables are there, too."""
    batches = batches_of(6)
    case = Case(device, options={"depth": depth, "cache": cache})
    for label, rows in case.loop(batches):
        case.step(label, rows)
        other = Case(device, options={"depth": 0}).train(batches[: rows.step])
        assert bits_of(case.runtime.lookup(ids(batches[0]))) == bits_of(other.runtime.lookup(ids(batches[0])))
    assert differing(case.state(), wanted_of(device, batches)) == []


def test_some_of_the_features(device):
    """An item's tower alone: ids of the others are not needed, and are not looked at where they are there."""
    case = Case(device, options={"cache": "20%"}).train(batches_of(2))
    batch = ids(batches_of(1)[0])
    wanted = bits_of(case.runtime.lookup(batch))
    items = {"item": batch["item"], "history": batch["history"]}
    found = case.runtime.lookup(items, features=["history", "item"])
    assert list(found) == ["history", "item"]
    assert bits_of(found) == {name: wanted[name] for name in found}
    assert list(case.runtime.lookup({**batch, "user": np.array([-7])}, features="item")) == ["item"]
    for given, ids_of in [(items, None), (batch, None), ((batch,), lambda one: one[0]), ((items,), lambda one: one[0])]:
        for _, rows in case.runtime.predict([given] * 3, ids=ids_of, features=["item", "history"]):
            assert list(rows) == ["item", "history"]
            assert bits_of(rows) == {name: wanted[name] for name in rows}
            with pytest.raises(KeyError, match="'user'; the features are item, history in this loop over predict"):
                rows["user"]
    assert differing(case.state(), Case(device).train(batches_of(2)).state()) == []


def test_features_that_are_none():
    case, batch = Case(), ids(batches_of(1)[0])
    for features, message in [
        (["itme"], "no feature 'itme'; the features are user, item, history, words"),
        ([], "no features are given; the features are user"),
    ]:
        for call in (case.runtime.lookup, lambda one, features: case.runtime.predict([one], features=features)):
            with pytest.raises(ValueError, match=message):
                call(batch, features=features)
    with pytest.raises(ValueError, match="batch 1: no ids for the features item"):
        case.runtime.lookup({"user": [1]}, features=["item"])
    with pytest.raises(ValueError, match="batch 1: `ids` returned ids for 'usr', but the runtime's features are user"):
        next(case.runtime.predict([1], ids=lambda _: {"usr": [1], "item": [2]}, features=["item"]))
    with pytest.raises(TypeError, match="batch 1: `ids` .* dict .* not a list"):
        case.runtime.lookup([1], features=["item"])
    with pytest.raises(hostdev.UserError, match="batch 1: feature 'user': id 40 at position 0 is outside 0..39"):
        case.runtime.lookup({"user": [40]}, features=["user"])
    with pytest.raises(ValueError, match="features and micro_batches"):
        case.runtime.predict([batch], micro_batches=1, features=["user"])
    case.runtime.lookup(batch)


def test_in_inference_mode_rows_may_be_changed(device):
    case = Case(device)
    with torch.inference_mode():
        found = case.runtime.lookup(ids(batches_of(1)[0]))
    assert not any(part.is_inference() for part in (found["user"], *found["item"], found["history"], found["words"]))
