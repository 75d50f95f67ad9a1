"""Features of all kinds against whole tables in plain torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hostdev
from hostdev import Bag, DeviceTable, Feature, HostTable, Runtime
from hostdev.distributed.world import ALONE_WORLD
from hostdev.runtime.features import require_seeds, resolve
from tests.runtime.cases import CPU, sgd, weights_of

V, D = 50, 3
LENGTHS = np.array([3, 0, 1, 5, 0, 2, 0])
OFFSETS = np.array([0, 3, 3, 4, 9, 9, 11])


def table_of(device=CPU, where="host", name="t", rows=V, dim=D, optimizer=None):
    arguments = {"name": name, "init": hostdev.Normal(1.0)}
    if where == "device":
        return DeviceTable(rows, dim, optimizer or sgd(), device, **arguments)
    return HostTable(rows, dim, optimizer or sgd(), **arguments)


def single(at, weight, padding=None, weights=None):
    """A row for each id."""
    at = torch.from_numpy(at)
    rows = F.embedding(at.clamp(min=0), weight)
    if weights is not None:
        rows = rows * torch.from_numpy(weights).unsqueeze(-1)
    return rows if padding is None else rows * (at != padding).unsqueeze(-1)


def pooled(at, weight, mode, lengths=LENGTHS, padding=None, weights=None):
    """The bags one by one."""
    out, begin = [], 0
    rows = single(at, weight, padding, weights)
    for n in lengths.tolist():
        count = int((at[begin : begin + n] != padding).sum())
        total = rows[begin : begin + n].sum(0)
        out.append(total / max(1, count) if mode == "mean" else total)
        begin += n
    return torch.stack(out)


def kinds():
    """Kinds of a feature: what it is, the ids of a batch, and what plain torch makes of them."""
    rng = np.random.default_rng(4)
    values, grid, flat = rng.integers(0, V, LENGTHS.sum()), rng.integers(0, V, (7, 3)), rng.integers(0, V, 7)
    weights, grid_weights = rng.random(11, np.float32) - np.float32(0.5), rng.random((7, 3), np.float32)
    threes = np.full(7, 3)
    emptied, padded = values.copy(), grid.copy()
    emptied[[0, 1, 2, 5]] = 7  # a bag of nothing else
    padded[[0, 0, 0, 3], [0, 1, 2, 2]] = -1
    one, total, mean = {}, {"pooling": "sum"}, {"pooling": "mean"}
    out, inside, third = {"padding": -1}, {"padding": 7}, {"padding": int(flat[2])}
    return {
        "one id": (one, flat, lambda w: single(flat, w)),
        "one id, pooled": (mean, flat, lambda w: single(flat, w)),
        "k ids": (one, grid, lambda w: single(grid, w)),
        "k ids with weights": (one, Bag(grid, weights=grid_weights), lambda w: single(grid, w, weights=grid_weights)),
        "sum of k": (total, grid, lambda w: single(grid, w).sum(1)),
        "mean of k": (mean, torch.from_numpy(grid), lambda w: single(grid, w).mean(1)),
        "bags": (one, (values, LENGTHS), lambda w: single(values, w)),
        "bags with weights": (one, (values, LENGTHS, weights), lambda w: single(values, w, weights=weights)),
        "sum": (total, (values, LENGTHS.tolist()), lambda w: pooled(values, w, "sum")),
        "mean": (mean, Bag(values, offsets=OFFSETS), lambda w: pooled(values, w, "mean")),
        "weighted sum": (total, (values, LENGTHS, weights), lambda w: pooled(values, w, "sum", weights=weights)),
        "weighted mean": (
            mean,
            Bag(values, torch.from_numpy(LENGTHS), None, weights.tolist()),
            lambda w: pooled(values, w, "mean", weights=weights),
        ),
        "weighted mean of k": (
            mean,
            Bag(grid, weights=torch.from_numpy(grid_weights)),
            lambda w: pooled(grid.ravel(), w, "mean", threes, weights=grid_weights.ravel()),
        ),
        "weights of half the precision": (
            total,
            Bag(grid, weights=torch.full((7, 3), 0.5, dtype=torch.bfloat16)),
            lambda w: 0.5 * single(grid, w).sum(1),
        ),
        "padding, k ids": (out, padded, lambda w: single(padded, w, -1)),
        "padding, one id": (third, flat, lambda w: single(flat, w, flat[2])),
        "padding, one id, pooled": (mean | third, flat, lambda w: single(flat, w, flat[2])),
        "padding, mean of k": (mean | out, padded, lambda w: pooled(padded.ravel(), w, "mean", threes, -1)),
        "padding, bags": (inside, (emptied, LENGTHS), lambda w: single(emptied, w, 7)),
        "padding, weighted sum": (
            total | inside,
            (emptied, LENGTHS, weights),
            lambda w: pooled(emptied, w, "sum", padding=7, weights=weights),
        ),
        "padding, mean": (
            mean | inside,
            Bag(emptied, offsets=OFFSETS),
            lambda w: pooled(emptied, w, "mean", padding=7),
        ),
        "padding that no id is": ({"padding": 10**12}, grid, lambda w: single(grid, w)),
        "no id": (total, ([], [0, 0, 0]), lambda w: torch.zeros(3, D)),
        "no id, offsets": (mean, Bag([], offsets=[0, 0]), lambda w: torch.zeros(2, D)),
        "no sample": (one, [], lambda w: torch.zeros(0, D)),
        "no bag": (mean, Bag(torch.tensor([]), lengths=[]), lambda w: torch.zeros(0, D)),
        "nothing but padding": (total | out, np.full((4, 2), -1), lambda w: torch.zeros(4, D)),
    }


KINDS = kinds()


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("where", ["host", "host, cached", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_feature(device, kind, where):
    """One of its own in a table, forward and backward; in bfloat16, too."""
    options, given, expected = KINDS[kind]
    table = table_of(device, where.split(",")[0])
    weight = nn.Parameter(torch.tensor(weights_of(table)))
    runtime = Runtime({"x": Feature(table, **options)}, device=device, cache=10 if "cached" in where else None)
    optimizer = torch.optim.SGD([weight], lr=0.3)
    for _, rows in runtime.train([{"x": given}] * 3):
        wanted = expected(weight)
        assert rows["x"].shape == wanted.shape
        torch.testing.assert_close(rows["x"].detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-6)
        scale = torch.arange(1.0, wanted.numel() + 1).view(wanted.shape) / 50
        (rows["x"].sin() * scale.to(device)).sum().backward()
        if wanted.requires_grad:
            optimizer.zero_grad()
            (wanted.sin() * scale).sum().backward()
            optimizer.step()
    np.testing.assert_allclose(weights_of(table), weight.detach(), rtol=1e-4, atol=1e-5)
    runtime = Runtime({"x": Feature(table, dtype="bfloat16", **options)}, device=device)
    found = runtime.lookup({"x": given})["x"]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.cpu().float(), expected(weight.detach()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cache", [None, "20%", {"a": 4, "d": hostdev.CacheSpec("50%", "lfu")}])
def test_many_features(device, cache):
    """All kinds at once, several in one table, some in two, over tables of other sizes, optimizers and places."""
    tables = {
        "a": table_of(device, name="a"),
        "b": table_of(device, name="b", dim=1),
        "c": table_of(device, "device", name="c", rows=V + 9, dim=7),
        "d": table_of(device, name="d", rows=V + 1, dim=2, optimizer=hostdev.SGD(lr=0.1)),
    }
    rates = {"a": 0.3, "b": 0.3, "c": 0.3, "d": 0.1}
    of = [("a", "b"), ("a",), ("c",), ("a", "d"), ("d", "b", "c")]
    features, batch, chosen = {}, {}, {}
    for number, (kind, (options, given, expected)) in enumerate(KINDS.items()):
        names = of[number % len(of)]
        if "bag" in kind or "no " in kind or "nothing" in kind:
            names = names[:1]
        features[kind] = Feature(
            tuple(tables[name] for name in names) if len(names) > 1 else tables[names[0]], **options
        )
        batch[kind], chosen[kind] = given, (names, expected)
    weights = {name: nn.Parameter(torch.tensor(weights_of(table))) for name, table in tables.items()}
    optimizer = torch.optim.SGD([{"params": [weight], "lr": rates[name]} for name, weight in weights.items()])
    runtime = Runtime(features, device=device, cache=cache)
    for _, rows in runtime.train([batch] * 4):
        loss, wanted = torch.zeros((), device=device), torch.zeros(())
        for number, (kind, (names, expected)) in enumerate(chosen.items(), 1):
            found = rows[kind] if len(names) > 1 else (rows[kind],)
            assert len(found) == len(names)
            for name, part in zip(names, found, strict=True):
                plain = expected(weights[name])
                if not plain.requires_grad:
                    assert not part.detach().any()
                    continue
                torch.testing.assert_close(part.detach().cpu(), plain.detach(), rtol=1e-4, atol=1e-5)
                loss, wanted = loss + part.sin().sum() / number, wanted + plain.sin().sum() / number
        optimizer.zero_grad()
        wanted.backward()
        loss.backward()
        optimizer.step()
    for name, table in tables.items():
        np.testing.assert_allclose(weights_of(table), weights[name].detach(), rtol=1e-3, atol=1e-4, err_msg=name)


def test_dtypes_of_each_table(device):
    one, two = table_of(device, name="one"), table_of(device, name="two")
    features = {"x": Feature((one, two), dtype=("bfloat16", "float32")), "y": Feature(one, dtype="bfloat16"), "z": two}
    runtime, ids = Runtime(features, device=device), np.arange(5)
    for _, rows in runtime.train([{"x": ids, "y": ids, "z": ids}]):
        assert [part.dtype for part in (*rows["x"], rows["y"], rows["z"])] == [
            torch.bfloat16,
            torch.float32,
            torch.bfloat16,
            torch.float32,
        ]
        assert rows["x"][0].equal(rows["y"])
        assert rows["x"][1].equal(rows["z"])
        (rows["x"][0].sum() + rows["y"].float().sum() + rows["z"].sum()).backward()
        assert [parameter.grad.dtype for parameter in rows.parameters()] == [torch.float32] * 2
        assert rows.parameters()[0].grad.unique().tolist() == [2.0]


def test_a_table_with_many_uses_of_a_row(device):
    """Of one row by all ids of several features."""
    table = table_of(device)
    weight = nn.Parameter(torch.tensor(weights_of(table)))
    features = {"x": Feature(table, pooling="sum"), "y": table, "z": Feature(table, pooling="mean")}
    at = np.full((40, 5), 3)
    for _, rows in Runtime(features, device=device, cache=1).train([{"x": at, "y": at, "z": at}] * 3):
        (rows["x"].sum() + rows["y"].sum() + rows["z"].sum()).mul(1e-3).backward()
    expected = weight.detach()[3] - 3 * 0.3 * 1e-3 * (200 + 200 + 40)
    np.testing.assert_allclose(weights_of(table)[3], expected, rtol=1e-5)
    np.testing.assert_array_equal(np.delete(weights_of(table), 3, 0), np.delete(weight.detach().numpy(), 3, 0))


def test_what_was_given_is_not_changed_nor_kept():
    """Ids with padding, weights, lengths: in their places after the loop, read-only or not."""
    table = table_of()
    runtime = Runtime({"x": Feature(table, pooling="sum", padding=0), "y": table}, device="cpu")
    given = {"x": Bag(np.array([0, 4, 0, 5]), np.array([2, 2]), weights=np.ones(4, np.float32)), "y": np.arange(6)}
    arrays = [given["x"].values, given["x"].lengths, given["x"].weights, given["y"]]
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    for _, rows in runtime.train([given] * 3):
        (rows["x"].sum() + rows["y"].square().sum()).backward()
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_unsigned_ids_and_their_padding():
    """2^64 - 1 is a padding as any other; what is beyond int64 is named as it was given."""
    table = HostTable(5, 2, hostdev.SGD(), name="t", init=hostdev.Constant(1.0))
    most = 2**64 - 1
    for padding in (most, -1):
        runtime = Runtime({"x": hostdev.Feature(table, pooling="sum", padding=padding)}, device="cpu")
        for given in (
            np.array([[3, most], [most, most]], np.uint64),
            torch.tensor([[3, most], [most, most]], dtype=torch.uint64),
        ):
            rows = runtime.lookup({"x": given})["x"]
            assert rows[:, 0].tolist() == [1, 0]
    for padding in (None, 2**63):
        runtime = Runtime({"x": hostdev.Feature(table, pooling="sum", padding=padding)}, device="cpu")
        for given in (np.array([[3, most]], np.uint64), [[3, most]], [[-1, most]], [[3, 2**64 - 1]] * 160):
            with pytest.raises(ValueError, match=f"feature 'x': an id: {most} at position 1 is beyond int64"):
                runtime.lookup({"x": given})
    with pytest.raises(ValueError, match="feature 'x': lengths: 18446744073709551615 at position 0 is beyond int64"):
        runtime.lookup({"x": ([1], np.array([most], np.uint64))})


def test_the_parts_of_a_table_have_one_seed():
    """`torch.manual_seed(seed + rank)` is usual, and would give each rank rows of another table."""

    class Ranks:
        rank, control = 0, SimpleNamespace(share=lambda seeds: [seeds, {"t": 7}])

    for seed in (7, 1):
        _, groups = resolve({"x": HostTable(5, 2, hostdev.SGD(), name="t", seed=seed, part=(0, 2))})
        if seed == 7:
            require_seeds(groups, Ranks)
            require_seeds(groups, ALONE_WORLD)
    with pytest.raises(hostdev.UserError, match="table 't' has the seed 7 on rank 1, but 1 on rank 0; pass the same"):
        require_seeds(groups, Ranks)
