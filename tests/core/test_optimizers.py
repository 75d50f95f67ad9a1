"""Optimizers for users: a learning rate that may change, names, and messages for wrong values."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from hostdev.core.errors import UserError
from hostdev.core.optimizers import (
    FTRL,
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    LazyAdam,
    Momentum,
    RowWiseAdagrad,
    RowWiseAdam,
    build_optimizer,
)
from hostdev.device.table import DeviceTable
from hostdev.host.table import HostTable
from tests import naive

ALL = [LazyAdam, Adam, FTRL, SGD, Adagrad, RowWiseAdagrad, RowWiseAdam, Momentum]
FROM_ZERO = [one for one in ALL if one is not FTRL]  # all but FTRL, which divides by its learning rate


@pytest.mark.parametrize("make", ALL)
def test_a_learning_rate_that_is_set_counts_from_the_next_update_on(make):
    rng = np.random.default_rng(0)
    optimizer = make(lr=0.1)
    table = HostTable(50, 3, optimizer, name="t")
    twin = naive.Table(table.weights, optimizer)
    for lr in (0.1, 0.01, 0.02, 0.3):
        optimizer.lr = lr
        assert table.optimizer.lr == lr
        ids, grads = rng.integers(0, 50, 40), rng.standard_normal((40, 3), dtype=np.float32)
        table.apply(ids, grads)
        twin.apply(ids, grads)
        np.testing.assert_array_equal(table.weights, twin.current()["weights"])
    fixed = HostTable(50, 3, make(lr=0.1), name="t")
    rng = np.random.default_rng(0)
    for _ in range(4):
        fixed.apply(rng.integers(0, 50, 40), rng.standard_normal((40, 3), dtype=np.float32))
    assert not np.array_equal(fixed.weights, table.weights)


@pytest.mark.parametrize("make", FROM_ZERO)
def test_a_warm_up_from_zero_leaves_the_weights_and_feeds_the_slots(make):
    optimizer = make(lr=0)
    table = HostTable(10, 4, optimizer, name="t")
    before = table.weights.copy()
    slots = {name: values.copy() for name, values in table.slots.items()}
    table.apply([1, 2, 1], np.ones((3, 4), np.float32))
    np.testing.assert_array_equal(table.weights, before)
    assert all((table.slots[name][1] != values[1]).all() for name, values in slots.items())
    optimizer.lr = 0.5
    table.apply([1], np.ones((1, 4), np.float32))
    assert (table.weights[1] < before[1]).all()


def test_ftrl_says_why_it_cannot_start_at_zero():
    optimizer = FTRL()
    for wrong in (lambda: FTRL(lr=0), lambda: setattr(optimizer, "lr", 0.0)):
        with pytest.raises(ValueError, match=r"lr must be positive, not 0(\.0)?; FTRL divides by lr"):
            wrong()
    assert optimizer == FTRL()


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), 1e39, 1e-50])
def test_a_wrong_learning_rate_is_refused_and_the_old_one_stays(make, wrong):
    optimizer = make(lr=0.25)
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.lr = wrong
    assert optimizer.lr == 0.25


@pytest.mark.parametrize("make", ALL)
def test_other_fields_stay_as_they_are(make):
    optimizer = make()
    for name in [field.name for field in dataclasses.fields(make) if field.name != "lr"] + ["momentum"]:
        with pytest.raises(dataclasses.FrozenInstanceError, match=rf"{make.__name__}: only lr .*, not {name};"):
            setattr(optimizer, name, 0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del optimizer.lr
    assert optimizer == make()


@pytest.mark.parametrize("make", ALL)
def test_equality_hashes_and_copies(make):
    optimizer = make(lr=0.5)
    number = hash(optimizer)
    assert optimizer == make(lr=0.5) != make(lr=0.25)
    copies = [copy.copy(optimizer), copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    optimizer.lr = 0.25
    assert hash(optimizer) == number == hash(make(lr=0.5))  # it may be a key while lr changes
    assert copies == [make(lr=0.5)] * 3
    assert dataclasses.replace(optimizer, lr=0.125) == make(lr=0.125)


def test_ftrl_says_what_takes_the_place_of_weight_decay():
    assert FTRL(weight_decay=0) == FTRL()
    with pytest.raises(TypeError, match="FTRL has no weight_decay: .*; use l2"):
        FTRL(weight_decay=0.1)


@pytest.mark.parametrize("make", [one for one in ALL if one is not FTRL])
def test_weight_decay_takes_a_value_per_row(make):
    assert "weight_decay" not in repr(make())
    assert "weight_decay=0.1" in repr(make(weight_decay=0.1))
    assert list(make(weight_decay=0.1).row_slots)[-1] == "last"
    assert ("last" in make().row_slots) == (make is Adam)


@pytest.mark.parametrize("make", [one for one in ALL if one is not Momentum])
def test_momentum_is_an_optimizer_of_its_own(make):
    with pytest.raises(TypeError, match=rf"{make.__name__} has no momentum; use hostdev.Momentum"):
        make(momentum=0.9)


def test_optimizers_by_name():
    assert [type(build_optimizer(name)) for name in OPTIMIZERS] == ALL
    assert list(OPTIMIZERS) == [
        "lazy_adam",
        "adam",
        "ftrl",
        "sgd",
        "adagrad",
        "row_wise_adagrad",
        "row_wise_adam",
        "momentum",
    ]
    assert build_optimizer("adagrad", 0.5) == Adagrad(lr=0.5)
    assert build_optimizer("adagrad", 0) == Adagrad(lr=0)
    assert build_optimizer("sgd") is not build_optimizer("sgd")  # each has a learning rate of its own
    with pytest.raises(UserError, match="no table optimizer 'adamw'; choose one of lazy_adam, adam, ftrl, sgd, "):
        build_optimizer("adamw")
    with pytest.raises(UserError, match="ftrl: lr must be positive, not 0; FTRL divides by lr"):
        build_optimizer("ftrl", 0)


@pytest.mark.parametrize("table", [HostTable, DeviceTable])
@pytest.mark.parametrize("wrong", ["adam", "lazy_adam", LazyAdam, None, torch.optim.Adam([torch.zeros(1)])])
def test_what_is_no_optimizer_of_a_table(table, wrong):
    place = () if table is HostTable else (torch.device("cpu"),)
    with pytest.raises(TypeError, match=r"table 'items': the optimizer must be .*LazyAdam\(\), Adam\(\), FTRL\(\), "):
        table(3, 2, wrong, *place, name="items")
