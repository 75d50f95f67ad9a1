"""Initial values of a table's rows: seeds, distributions and arrays, and rows that are reset."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from hostdev import FTRL, SGD, Constant, DeviceTable, HostTable, LazyAdam, Normal, RowWiseAdagrad, Uniform, UserError
from hostdev.core.tables import initial_seed

CPU = torch.device("cpu")


def first(seed=None, **options):
    return HostTable(3, 2, SGD(), name="t", seed=seed, **options).weights.tobytes()


def copied(column):
    found = column[:]
    return found.numpy().copy() if isinstance(found, torch.Tensor) else np.array(found)


def test_a_table_without_a_seed_takes_torchs():
    before = torch.random.get_rng_state()
    try:
        found = []
        for seed in (1, 2, 1, -1, 2**64 - 1, 0):
            torch.manual_seed(seed)
            found.append(first())
            assert first() == first(seed=torch.initial_seed())
            other = DeviceTable(3, 2, SGD(), CPU, name="t")
            assert other.weights.numpy().tobytes() == first()
            assert other.seed == initial_seed(None)
        assert found[0] == found[2] == first(seed=1)
        assert found[3] == found[4]
        assert len(set(found)) == 4
        assert found[5] == first(seed=0)
        torch.rand(5)  # drawing is not seeding
        assert first() == first(seed=0)
    finally:
        torch.random.set_rng_state(before)


@pytest.mark.parametrize("imports", ["", "import torch"])
def test_where_nobody_has_set_a_seed_it_is_0(imports):
    code = f"{imports}\nfrom hostdev.host.table import HostTable\nfrom hostdev.core.optimizers import SGD\n"
    code += "import sys; print('torch' in sys.modules, HostTable(3, 2, SGD(), name='t').weights.tobytes().hex())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(bool(imports)), first(seed=0).hex()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_uniform_values(dtype):
    """Values have the right bounds, mean and variance; a part and a device table have the same ones."""
    table = HostTable(5000, 7, LazyAdam(), name="t", seed=4, init=Uniform(-0.5, 1.5), dtype=dtype)
    values = table.weights
    assert values.min() >= -0.5
    assert values.max() <= 1.5
    assert abs(values.mean() - 0.5) < 0.02
    assert abs(values.var() - 4 / 12) < 0.02
    assert not table.slots["m"].any()
    part = HostTable(5000, 7, LazyAdam(), name="t", seed=4, init=Uniform(-0.5, 1.5), dtype=dtype, part=(1, 3))
    np.testing.assert_array_equal(part.weights, values[part.ids(0, part.rows)])
    other = DeviceTable(5000, 7, LazyAdam(), CPU, name="t", seed=4, init=Uniform(-0.5, 1.5), dtype=dtype)
    np.testing.assert_array_equal(other.weights, values)
    assert not np.array_equal(values, HostTable(5000, 7, LazyAdam(), name="t", seed=5, init=Uniform(-0.5, 1.5)).weights)


@pytest.mark.parametrize("optimizer", [LazyAdam(), FTRL(), RowWiseAdagrad(initial_accum=0.5)], ids=str)
def test_values_of_an_array(optimizer):
    array = np.random.default_rng(0).standard_normal((50, 4), dtype=np.float32)
    plain = HostTable(50, 4, optimizer, name="t")
    for given in (array, array.astype(np.float64), torch.from_numpy(array), array.tolist()):
        table = HostTable(50, 4, optimizer, name="t", init=given)
        np.testing.assert_array_equal(table.weights, array)
        for name, values in table.slots.items():
            np.testing.assert_array_equal(values, plain.slots[name])
    part = HostTable(50, 4, optimizer, name="t", init=array, part=(1, 3))
    np.testing.assert_array_equal(part.weights, array[part.ids(0, part.rows)])
    np.testing.assert_array_equal(DeviceTable(50, 4, optimizer, CPU, name="t", init=array).weights, array)
    rounded = HostTable(50, 4, optimizer, name="t", init=array, dtype="bf16").weights
    assert (np.abs(rounded - array) <= np.abs(array) / 128).all()


def test_wrong_initial_values():
    for init, error, message in (
        (np.zeros((4, 2)), ValueError, r"table 't' has 3 rows of 2 columns,.* the shape \[4, 2\]"),
        (
            np.full((3, 2), np.nan),
            ValueError,
            "table 't': initial values must be finite; row 0 contains NaN or infinity",
        ),
        (np.zeros(3), TypeError, "table 't': init .*hostdev.Normal"),
        ("zeros", TypeError, "table 't': init .*hostdev.Normal.*, not str"),
    ):
        with pytest.raises(error, match=message):
            HostTable(3, 2, SGD(), name="t", init=init)
    for make in (
        lambda: Normal(float("inf")),
        lambda: Normal(float("nan")),
        lambda: Constant(1e39),
        lambda: Constant(float("nan")),
        lambda: Uniform(1, 1),
        lambda: Uniform(0, float("inf")),
    ):
        with pytest.raises(ValueError, match="must be|not"):
            make()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "init",
    [Normal(0.3), Uniform(), Constant(2.0), np.ones((20, 3), np.float32)],
    ids=["normal", "uniform", "constant", "array"],
)
def test_rows_that_are_erased_begin_again(init, dtype):
    optimizer = RowWiseAdagrad(initial_accum=0.5)
    for make in (
        lambda: HostTable(20, 3, optimizer, name="t", seed=2, init=init, dtype=dtype),
        lambda: HostTable(20, 3, optimizer, name="t", seed=2, init=init, dtype=dtype, part=(0, 1)),
        lambda: DeviceTable(20, 3, optimizer, CPU, name="t", seed=2, init=init, dtype=dtype),
    ):
        table, fresh = make(), make()
        grads = np.ones((20, 3), np.float32)
        table.update(
            *(
                map(torch.from_numpy, (np.arange(20), grads))
                if isinstance(table, DeviceTable)
                else (np.arange(20), grads)
            )
        )
        trained = {name: copied(column) for name, column in table.columns().items()}
        table.erase([4, 19, 4])
        for name, column in fresh.columns().items():
            found = copied(table.columns()[name])
            np.testing.assert_array_equal(found[[4, 19]], copied(column)[[4, 19]])
            np.testing.assert_array_equal(np.delete(found, [4, 19], 0), np.delete(trained[name], [4, 19], 0))
        assert table.step == 1
        with pytest.raises(UserError, match="table 't': id 20 at position 1 is outside"):
            table.erase([1, 20])


def test_given_values_are_described_by_what_they_are():
    """Processes that share a table compare this text."""
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    one, same, other = (HostTable(3, 2, SGD(), name="t", init=v).init for v in (values, values.tolist(), values + 1))
    assert repr(one) == repr(same) != repr(other)
