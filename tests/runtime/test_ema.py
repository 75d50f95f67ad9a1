"""Averages of rows: those of a dense average, at any depth, and an evaluation with them that leaves no trace."""

import numpy as np
import pytest
import torch

import hostdev
from hostdev import EMA, DeviceTable, HostTable
from tests.runtime.cases import Case, batches_of, bits, differing, ids, overlapped, weights_of

DECAY = 0.9


def averages_of(device, depth=0, cache=None, *, by_ids=True, on_device=()):
    """Train with the averages of users and items; return them, a dense average of the users, and the case."""
    case = Case(device, on_device=on_device, options={"depth": depth, "cache": None if on_device else cache})
    users, items = (EMA(case.tables[name], DECAY) for name in ("users", "items"))
    dense = weights_of(case.tables["users"]).astype(np.float64)
    batches = batches_of(12)
    for batch, (label, rows) in zip(batches, case.loop(batches), strict=True):
        case.step(label, rows)
        users.update(batch["user"] if by_ids else None)
        items.update(np.concatenate([batch["item"], batch["history"][batch["history"] >= 0]]) if by_ids else None)
        dense = DECAY * dense + (1 - DECAY) * weights_of(case.tables["users"])
    return users, items, dense, case


@pytest.mark.parametrize("on_device", [(), ("users", "words")], ids=["host", "both sides"])
@overlapped
def test_an_average_is_that_of_all_rows_at_each_step(device, depth, cache, on_device):
    users, items, dense, case = averages_of(device, depth, cache, on_device=on_device)
    np.testing.assert_allclose(users.weights, dense, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(users.lookup([3, 7, 3]), users.weights[[3, 7, 3]])
    other, of_items, _, serial = averages_of(device, by_ids=False)
    assert bits(other.weights) == bits(users.weights)
    assert bits(of_items.weights) == bits(items.weights)
    assert differing(case.state(), serial.state()) == []


@overlapped
def test_an_evaluation_with_averages_leaves_the_tables_as_they_were(device, depth, cache):
    batches = batches_of(6)
    case = Case(device, bf16=("items",), options={"depth": depth, "cache": cache})
    averages = {name: EMA(case.tables[name], DECAY) for name in ("users", "items")}
    for number, (label, rows) in enumerate(case.loop(batches)):
        case.step(label, rows)
        for average in averages.values():
            average.update()
        if number % 2:
            with averages["users"].applied(), averages["items"].applied():
                found = case.runtime.lookup(ids(batches[0]))["user"]
                wanted = averages["users"].weights[batches[0]["user"]]
                np.testing.assert_array_equal(found.detach().cpu(), wanted)
                assert (np.abs(case.tables["items"].weights - averages["items"].weights) < 0.01).all()
    wanted = Case(device, bf16=("items",)).train(batches)
    assert differing(case.state(), wanted.state()) == []


def test_an_average_is_saved_and_goes_on(tmp_path):
    case = Case()
    average = EMA(case.tables["users"], DECAY)
    batches = batches_of(6)

    def train(one, mean, some):
        for label, rows in one.loop(some):
            one.step(label, rows)
            mean.update()

    train(case, average, batches[:3])
    case.runtime.save(tmp_path / "c", extra={"average": average.state_dict()})
    train(case, average, batches[3:])
    other = Case()
    other.model, other.adam = case.model, case.adam
    again = EMA(other.tables["users"], 0.5)
    again.load_state_dict(other.runtime.load(tmp_path / "c")["average"])
    assert (again.decay, again.steps) == (DECAY, 3)
    train(other, again, [])
    again.update()
    assert (again.decay, again.steps) == (DECAY, 4)
    assert average.steps == 6
    with pytest.raises(ValueError, match=r"table 'words' .* \[30, 4\], .* \[40, 4\]"):
        EMA(case.tables["words"], 0.5).load_state_dict(average.state_dict())


def test_wrong_averages(device):
    table = HostTable(5, 2, hostdev.SGD(), name="t")
    for decay in (1, -0.1, True, "0.9"):
        with pytest.raises(ValueError, match="table 't': decay must be in"):
            EMA(table, decay)
    with pytest.raises(TypeError, match="EMA .*HostTable .*DeviceTable, not a Parameter"):
        EMA(torch.nn.Parameter(torch.zeros(2, 2)), 0.9)
    with pytest.raises(hostdev.UserError, match="table 't': id 5 at position 0 is outside 0..4"):
        EMA(table, 0.9).update([5])
    EMA(DeviceTable(5, 2, hostdev.SGD(), device, name="t"), 0.9).update(torch.tensor([[1], [4]], device=device))
    part = HostTable(5, 2, hostdev.SGD(), name="t", part=(1, 2))
    with pytest.raises(ValueError, match=r"table 't': this rank .*; call update\(\) without ids"):
        EMA(part, 0.9).update([3])
