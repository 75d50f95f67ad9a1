"""Features that the model gets in one tensor: the values and the bits are those of `torch.stack`."""

import numpy as np
import pytest
import torch

import hostdev
from hostdev import Feature, HostTable

V, B, D = 50, 16, 4
NAMES = ["a", "b", "c", "d"]


def make(*, stacks, dim=D, depth=0, cache=None, dtype="float32", pooling=("sum", "mean", "sum", None), shared=False):
    tables = [HostTable(V, dim, hostdev.LazyAdam(lr=0.1), name=f"t{i}", seed=i) for i in range(4)]
    if shared:
        tables[2] = tables[0]
    features = {
        name: Feature(table, pooling=how, dtype=dtype) for name, table, how in zip(NAMES, tables, pooling, strict=True)
    }
    runtime = hostdev.Runtime(features, device="cpu", depth=depth, cache=cache, stacks=stacks)
    return runtime, list(dict.fromkeys(tables))


def batches(count=8):
    """Bags with and without weights, some of them empty, and one id per sample."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        lengths = rng.integers(0, 4, B)
        n = int(lengths.sum())
        yield {
            "a": rng.integers(0, V, (B, 3)),
            "b": (rng.integers(0, V, n), lengths),
            "c": (rng.integers(0, V, n), lengths, rng.random(n, np.float32)),
            "d": rng.integers(0, V, B),
        }


def trained(names, *, as_stack, single=(), **options):
    """Return the losses and tables after training with features in a stack, and others apart."""
    runtime, tables = make(stacks={"all": names} if as_stack else None, **options)
    losses, weight = [], torch.linspace(-1, 1, len(names) * options.get("dim", D)).view(len(names), -1)
    for _, rows in runtime.train(batches()):
        stack = rows["all"] if as_stack else torch.stack([rows[name] for name in names], 1)
        assert stack.is_contiguous()
        loss = (stack.float() * weight).square().sum() + sum(rows[name].float().sum() * 0.1 for name in single)
        loss.backward()
        losses.append(loss.item())
    runtime.close()
    return losses, [table.weights.copy() for table in tables]


def same(found, expected):
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dim", [1, 4, 17])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("names", "single"), [(NAMES, []), (["c", "a"], ["b", "d"]), (["d"], ["a"])])
def test_the_bits_of_torchs_stack(names, single, dtype, dim):
    how = {"single": single, "dtype": dtype, "dim": dim}
    same(trained(names, as_stack=True, **how), trained(names, as_stack=False, **how))


@pytest.mark.parametrize("options", [{"depth": 2}, {"cache": "50%"}, {"depth": 2, "cache": "50%"}, {"shared": True}])
def test_every_mode(options):
    expected = trained(NAMES, as_stack=False, shared=options.get("shared", False))
    same(trained(NAMES, as_stack=True, **options), expected)


def test_frozen_tables():
    """A stack of trained and frozen tables, and one of frozen ones, have the values of the others."""
    found = {}
    for as_stack in (True, False):
        runtime, tables = make(stacks={"x": ["a", "b"], "y": ["c", "d"]} if as_stack else None)
        runtime.freeze("t1", "t2", "t3")
        for _, rows in runtime.train(batches(3)):
            x, y = (rows["x"], rows["y"]) if as_stack else (torch.stack([rows[a], rows[b]], 1) for a, b in ("ab", "cd"))
            assert (x.requires_grad, y.requires_grad) == (True, False)
            (x.square().sum() + y.sum()).backward()
        found[as_stack] = [], [table.weights.copy() for table in tables]
        runtime.close()
    same(found[True], found[False])


def test_prediction_and_lookup():
    runtime, _ = make(stacks={"x": ["b", "a"]})
    plain, _ = make(stacks=None)
    for (_, rows), (batch, others) in zip(runtime.predict(batches(2)), plain.predict(batches(2)), strict=True):
        expected = torch.stack([others["b"], others["a"]], 1)
        assert torch.equal(rows["x"], expected)
        assert set(rows) == {"c", "d", "x"}
        with pytest.raises(KeyError, match="no feature 'a'; the features are c, d, x"):
            rows["a"]
        assert torch.equal(runtime.lookup(batch)["x"], expected)
        assert torch.equal(runtime.lookup({"a": batch["a"], "b": batch["b"]}, features=["x"])["x"], expected)
        with pytest.raises(ValueError, match="no feature 'a'; the features are c, d, x"):
            runtime.lookup(batch, features=["a"])
    for _, some in runtime.predict(batches(1), features=["x", "d"]):
        assert set(some) == {"x", "d"}
    for _, some in runtime.predict(batches(1), features=["d"]):
        assert set(some) == {"d"}


@pytest.mark.parametrize(
    ("stacks", "error", "message"),
    [
        (["a"], TypeError, "stacks must be a dict from names to lists of features, not"),
        ({"x": "a"}, TypeError, "stack 'x' must be a list of features' names, not"),
        ({"x": []}, ValueError, "stack 'x' has no features"),
        ({"x": ["a", "z"]}, ValueError, "stack 'x': no feature 'z'; the features are a, b, c, d"),
        ({"a": ["b"]}, ValueError, "stack 'a' has the name of a feature"),
        ({"x": ["a"], "y": ["b", "a"]}, ValueError, "feature 'a' is in stack 'x' and again in 'y'"),
    ],
)
def test_wrong_stacks(stacks, error, message):
    with pytest.raises(error, match=message):
        make(stacks=stacks)


def test_features_that_do_not_go_together():
    wide, one = (HostTable(V, dim, hostdev.SGD(), name=f"w{dim}") for dim in (8, 4))
    for features, message in (
        ({"a": wide, "b": one}, "'a' has dim 8 and dtype float32, but 'b' has dim 4 and dtype float32"),
        ({"a": one, "b": Feature(one, dtype="bfloat16")}, "dtype float32, but 'b' has dim 4 and dtype bfloat16"),
        ({"a": (one, wide), "b": one}, "feature 'a' has several tables, but must have one"),
    ):
        with pytest.raises(ValueError, match=message):
            hostdev.Runtime(features, device="cpu", stacks={"x": ["a", "b"]})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"a": np.zeros((5, 2), np.int64), "b": np.zeros(5, np.int64)}, "feature 'a' has 2 rows per sample; give the"),
        ({"a": np.zeros(5, np.int64), "b": np.zeros(4, np.int64)}, "'a' has 5 samples in this batch, but 'b' has 4"),
    ],
)
def test_batches_that_do_not_fit(ids, message):
    table = HostTable(V, D, hostdev.SGD(), name="t")
    runtime = hostdev.Runtime({"a": table, "b": table}, device="cpu", stacks={"x": ["a", "b"]})
    with pytest.raises(ValueError, match=message):
        next(iter(runtime.train([ids])))
    with pytest.raises(ValueError, match=message):
        runtime.lookup(ids)
