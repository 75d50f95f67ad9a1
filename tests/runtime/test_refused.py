"""Wrong features, ids and arguments are refused in one line: where, what, and what to do."""

import numpy as np
import pytest
import torch

import hostdev
from hostdev import Bag, CacheSpec, Feature, HostTable, Runtime, UserError
from tests.runtime.cases import CPU, Case, batches_of, tables_of
from tests.runtime.test_features import V, table_of

ARRAY = np.arange(6)
IDS = {
    "none for a feature": ({}, ValueError, "batch 2: no ids for the features x$"),
    "for an unknown one": (
        {"x": ARRAY, "y": ARRAY},
        ValueError,
        "batch 2: `ids` returned ids for 'y', but the .* features are x",
    ),
    "floats": (ARRAY / 2, TypeError, "batch 2: feature 'x': ids must be integers, not a ndarray of float64"),
    "floats of torch": (torch.ones(2), TypeError, "feature 'x': ids must be integers, not a Tensor of torch.float32"),
    "halves of torch": (torch.ones(2).bfloat16(), TypeError, "ids must be integers, not a Tensor of torch.bfloat16"),
    "bools": (ARRAY > 2, TypeError, "feature 'x': ids must be integers, not a ndarray of bool"),
    "bools of torch": (torch.ones(2) > 0, TypeError, "feature 'x': ids must be integers, not .* of bool"),
    "strings": (["a", "b"], TypeError, "feature 'x': ids must be integers, not a list of <U1"),
    "a string": ("abc", TypeError, "feature 'x': ids must be integers, not 'abc' of <U3"),
    "None": (None, TypeError, "feature 'x': ids must be integers, not a NoneType of object"),
    "lists of several lengths": (
        [[1], [2, 3]],
        ValueError,
        "feature 'x': ids cannot be converted to an array .*inhomogeneous",
    ),
    "a number": (
        3,
        ValueError,
        r"feature 'x': ids must be of shape \[B\], \[B, k\] or, with lengths, \[N\], not \[\]",
    ),
    "three dimensions": (np.zeros((2, 2, 2), int), ValueError, r"with lengths, \[N\], not \[2, 2, 2\]"),
    "a tuple of four": ((ARRAY,) * 4, ValueError, r"a tuple of ids must be \(values, lengths\[, weights\]\)"),
    "lengths that add up to less": ((ARRAY, [2, 3]), ValueError, "the lengths add up to 5, but there are 6 ids"),
    "lengths that add up to more": (
        (ARRAY, [2, 2**40]),
        ValueError,
        "the lengths add up to 1099511627778, but there are 6 ids",
    ),
    "a negative length": ((ARRAY, [7, -1]), ValueError, "feature 'x': lengths must be at least 0, not -1"),
    "lengths that are floats": ((ARRAY, [3.0, 3.0]), TypeError, "feature 'x': lengths must be integers, not a list"),
    "lengths in two dimensions": (
        (ARRAY, [[6]]),
        ValueError,
        r"feature 'x': lengths must be of shape \[B\], not \[1, 1\]",
    ),
    "lengths of a grid": (
        (ARRAY.reshape(2, 3), [3, 3]),
        ValueError,
        r"with lengths or offsets must be of shape \[N\], not \[2, 3\]",
    ),
    "offsets that fall": (
        Bag(ARRAY, offsets=[0, 4, 2]),
        ValueError,
        "offsets must not decrease or be above 6, the number of ids",
    ),
    "offsets beyond the ids": (
        Bag(ARRAY, offsets=[0, 7]),
        ValueError,
        "must not decrease or be above 6, the number of ids",
    ),
    "offsets that begin later": (
        Bag(ARRAY, offsets=[1, 2]),
        ValueError,
        r"offsets must be of shape \[B\] and begin with 0",
    ),
    "no offsets": (Bag(ARRAY, offsets=[]), ValueError, "feature 'x': the offsets are empty, but there are 6 ids"),
    "weights of another shape": (Bag(ARRAY, weights=np.ones(5)), ValueError, r"weights .*\[5\], but ids have \[6\]"),
    "weights that are text": (
        Bag(ARRAY, weights=["a"] * 6),
        TypeError,
        "feature 'x': weights must be numbers, not <U1",
    ),
    "weights that learn": (
        Bag(ARRAY, weights=torch.ones(6, requires_grad=True)),
        ValueError,
        "feature 'x': weights get no gradients; pass weights.detach\\(\\)",
    ),
    "an id above": (
        [0, 1, V, 3],
        UserError,
        f"feature 'x': id {V} at position 2 is outside 0..{V - 1}, the rows of table 't'",
    ),
    "an id below": (np.array([[0, 1], [2, -1]]), UserError, "batch 2: feature 'x': id -1 at position 3 is outside 0.."),
    "a very large id": (np.array([1, 2**62]), UserError, f"id {2**62} at position 1 is outside"),
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", IDS)
def test_ids(kind, depth):
    """The second batch's: the first one has been stepped, and the message names the batch."""
    given, error, message = IDS[kind]
    table = table_of()
    runtime = Runtime({"x": table}, device="cpu", depth=depth, cache="20%" if depth else None)
    batches = [{"x": ARRAY}, given if isinstance(given, dict) else {"x": given}]
    with pytest.raises(error, match=message) as caught:
        for _, rows in runtime.train(batches, ids=lambda batch: batch):
            rows["x"].sum().backward()
    assert "batch 2: " in str(caught.value)
    assert "\n" not in str(caught.value).replace("\n\n", "")
    assert table.step == 1


def test_ids_outside_of_one_of_several_tables(device):
    """The feature, the table, and the position in what was given, padding and all."""
    tables = tables_of(device)
    features = {
        "a": tables["users"],
        "b": Feature((tables["items"], tables["first"]), padding=-1, pooling="sum"),
        "c": tables["items"],
    }
    good = np.arange(5)
    runtime = Runtime(features, device=device, depth=2)
    for wrong, message in [
        ({"a": np.array([3, 40])}, "feature 'a': id 40 at position 1 is outside 0..39, the rows of table 'users'"),
        ({"b": np.array([[-1, -1], [5, -1], [60, 1]])}, "'b': id 60 at position 4 is outside 0..59, .* table 'items'"),
        ({"b": ([-1, 3, -7, 60], [2, 2])}, "'b': id -7 at position 2 is outside 0..59, .* table 'items'"),
        ({"c": np.array([1, -1])}, "feature 'c': id -1 at position 1 is outside 0..59, the rows of table 'items'"),
    ]:
        with pytest.raises(UserError, match=message):
            for _ in runtime.train([{"a": good, "b": good, "c": good} | wrong]):
                pass


def test_batches_that_have_no_ids():
    runtime = Runtime({"x": table_of()}, device="cpu")
    with pytest.raises(TypeError, match="batch 1: without `ids`, .* dict .* not a list"):
        next(runtime.train([[1, 2]]))
    with pytest.raises(TypeError, match="batch 1: `ids` .* dict .* not a nda"):
        next(runtime.train([[1, 2]], ids=np.array))
    with pytest.raises(TypeError, match="not iterable"):
        next(runtime.train(7))


def test_features_that_are_none():
    table, other = table_of(), table_of(name="u")
    for features in ({}, [table], None, "x"):
        with pytest.raises(ValueError, match=r"features must be a dict from .* tuple of tables or a hostdev.Feature"):
            Runtime(features)
    for wrong, what in [
        ("t", "'t'"),
        (torch.nn.Embedding(2, 2), "an Embedding"),
        ((table, 3), "an int"),
        (None, "a None"),
    ]:
        with pytest.raises(TypeError, match=f"feature 'x' .*HostTable .*DeviceTable, not {what}"):
            Runtime({"x": wrong}, device="cpu")
    with pytest.raises(ValueError, match="feature 'x' names table 't' twice"):
        Runtime({"x": (table, other, table)}, device="cpu")
    with pytest.raises(ValueError, match="a feature needs at least one table"):
        Runtime({"x": ()}, device="cpu")
    with pytest.raises(ValueError, match="several tables are named 't'"):
        Runtime({"x": table, "y": table_of()}, device="cpu")
    with pytest.raises(ValueError, match="feature 'x' has 2 tables and 3 dtypes"):
        Runtime({"x": Feature((table, other), dtype=("float32",) * 3)}, device="cpu")
    with pytest.raises(ValueError, match='the pooling of a feature must be None, "sum" or "mean", not \'max\''):
        Feature(table, pooling="max")
    with pytest.raises(ValueError, match="dtype .*float32, bfloat16, not 'float16'"):
        Feature(table, dtype="float16")
    for padding in (True, 1.0, "0"):
        with pytest.raises(ValueError, match="the padding of a feature must be an id, not"):
            Feature(table, padding=padding)
    with pytest.raises(ValueError, match="a bag has lengths or offsets, not both"):
        Bag([1], lengths=[1], offsets=[0])


def test_a_table_elsewhere(device):
    meta = table_of(device, "device")
    meta._block = meta._block.to("meta")
    with pytest.raises(ValueError, match=f"table 't' is on meta, but the Runtime's device is {device}"):
        Runtime({"x": meta}, device=device)
    with pytest.raises(UserError, match="unknown kind of device"):
        Runtime({"x": table_of()}, device="gpu")


def test_caches_that_have_no_effect(device):
    tables = tables_of(device, on_device=("users",))
    features = {"a": tables["users"], "b": (tables["items"], tables["first"])}
    with pytest.raises(ValueError, match="a cache is given for table 'wrods', but the tables are users, items, first"):
        Runtime(features, device=device, cache={"wrods": 3})
    with pytest.raises(
        UserError, match="a cache has no effect on table 'users', which is on the device; remove it from cache="
    ):
        Runtime(features, device=device, cache={"users": 3})
    with pytest.raises(UserError, match="a cache has no effect if all tables are on the device; leave out cache="):
        Runtime({"a": tables["users"]}, device=device, cache="10%")
    with pytest.raises(ValueError, match="table 'first' shares its ids, and so its cache"):
        Runtime(features, device=device, cache={"items": 3, "first": 5})
    assert [cache.capacity for cache in Runtime(features, device=device, cache={"first": 5}).caches] == [5]
    assert Runtime(features, device=device, cache={"first": None}).caches == []


def test_caches_that_are_none():
    table = table_of()
    for size in ("x", -1, 1.5, "200%", True):
        with pytest.raises(UserError, match=f"a cache's size must be a number of rows or a share .*, not '{size}'"):
            Runtime({"x": table}, device="cpu", cache=size)
    for cache, message in [
        (CacheSpec(5, "best"), "the policy must be one of lookahead, lru, lfu, static, not 'best'"),
        (CacheSpec(5, window=99), r"the window must be in 0..32 batches, not 99"),
        (CacheSpec(5, window=2.5), r"the window must be in 0..32 batches, not 2.5"),
        (CacheSpec(5, "static"), r"the policy static needs counts of shape \(50,\), not None"),
    ]:
        with pytest.raises(ValueError, match=message):
            Runtime({"x": table}, device="cpu", cache=cache)
    sizes = [0, "0%", V + 1]
    runtimes = [Runtime({"x": table}, device="cpu", cache=size) for size in sizes]
    assert [runtime.caches[0].capacity for runtime in runtimes] == [0, 0, V]


def test_invalid_depths_and_options():
    table = table_of()
    for depth in (-1, 99, 2.0, "2", None):
        with pytest.raises(ValueError, match=f"the depth must be an integer in 0..98, not {depth!r}"):
            Runtime({"x": table}, device="cpu", depth=depth)
    with pytest.raises(TypeError, match="unexpected keyword argument 'deph'"):
        Runtime({"x": table}, device="cpu", deph=2)


def test_an_error_of_a_batch_ends_the_loop_at_once():
    """And leaves no thread and no open loop."""
    case = Case(CPU)
    batches = batches_of(3)
    batches[2] = {**batches[2], "user": np.array([99])}
    with pytest.raises(UserError, match="batch 3: feature 'user': id 99"):
        case.train(batches)
    assert case.tables["users"].step == 2
    case.train(batches[:1])
    assert isinstance(case.tables["users"], HostTable)
    assert hostdev.UserError is UserError
