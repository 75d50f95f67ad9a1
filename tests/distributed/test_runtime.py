"""A user's own loop over micro-batches on one process and on two: the same bits; and its error messages."""

import pickle

import numpy as np
import pytest
import torch

import hostdev
from tests.distributed import own_loop
from tests.distributed.same import assert_same, assert_same_tables
from tests.distributed.trees import tree_sum
from tests.runtime import cases
from tests.runtime.cases import Case, batches_of, differing, ids


@pytest.fixture(scope="module")
def alone():
    """Return the result of one process, without overlap or a cache."""
    return own_loop.train(None, own_loop.CHOICES["serial"])


def assert_about_the_same(parts, wanted):
    """All ranks have the same, which is that of one process but for rounding."""
    for part in parts[1:]:
        assert differing(part["dense"], parts[0]["dense"]) == []
        assert part["losses"] == parts[0]["losses"]
    for mine, theirs in zip(parts[0]["losses"], wanted["losses"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4)


@pytest.mark.parametrize("choice", own_loop.CHOICES)
def test_one_process_with_and_without_overlap_and_a_cache(alone, choice):
    assert_same([own_loop.train(None, own_loop.CHOICES[choice])], alone)


@pytest.fixture(scope="module")
def spoilt():
    """Return the result of one process with non-finite gradients in a micro-batch."""
    return own_loop.train(None, own_loop.CHOICES["overlapped"], spoilt=own_loop.SPOILT)


def test_gradients_that_are_not_finite(alone, spoilt):
    """Neither that step nor a later one changes the tables."""
    step, _ = own_loop.SPOILT
    assert spoilt["wrong"].startswith(f"step {step}: a gradient of the rows of 'users', ")
    assert spoilt["losses"][: step - 1] == alone["losses"][: step - 1]
    assert {table[0] for table in spoilt["tables"].values()} == {step - 1}


MISUSED = (
    "do not use GradScaler here",
    "clip only model.parameters()",
    "ranks can sum float32 gradients only",
    "must be of shape [] or [n], not [2, 2]",
)


def run(processes, count, alone, spoilt):
    processes.start_ranks(count, "-m", "tests.distributed.own_loop", processes.folder)
    for process in processes.ended():
        assert process.code == 0, process
    found = [pickle.loads((processes.folder / f"rank{rank}.pickle").read_bytes()) for rank in range(count)]
    for choice in (*own_loop.CHOICES, "with another", "beside"):
        assert_same([part[choice] for part in found], alone)
    assert_about_the_same([part["all-reduce"] for part in found], alone)
    scaled = own_loop.train(None, own_loop.SCALED["serial"])
    for choice in own_loop.SCALED:
        assert_same([part[f"{choice}, scaled"] for part in found], scaled)
    drawn = own_loop.train(None, own_loop.DRAWN["serial"])
    for choice in own_loop.DRAWN:  # the numbers that a micro-batch's ids draw do not depend on who reads it
        assert_same([part[f"{choice}, drawn"] for part in found], drawn)
    for part in found:
        assert list(part["misused"]) == ["scaled", "clipped", "double", "table"]
        for said, words in zip(part["misused"].values(), MISUSED, strict=True):
            assert words in said
    parts = [part["not finite"] for part in found]
    assert {part["wrong"] for part in parts} == {spoilt["wrong"]}
    assert_same_tables(parts, spoilt, steps=own_loop.SPOILT[0] - 1)
    held = [part["serial"]["tables"]["items"][1] for part in found]
    assert max(map(len, held)) <= -(-cases.ROWS["items"] // count)


def test_two_processes(processes, alone, spoilt):
    run(processes, 2, alone, spoilt)


@pytest.mark.slow
def test_three_processes(processes, alone, spoilt):
    run(processes, 3, alone, spoilt)


def step(case, label, rows, weight=0.5):
    (cases.loss_of(case.model, rows, label) * weight).backward()


def test_sums_of_micro_batches_are_those_of_the_tree():
    """The dense gradients that autograd computes, to the bit."""
    case = Case(options={"depth": 0})
    each, values = [], []
    for label, rows in case.loop(batches_of(3), micro_batches=3):
        loss = cases.loss_of(case.model, rows, label)
        loss.backward()
        each.append([parameter.grad.clone() for parameter in case.model.parameters()])
        values.append(loss.detach())
        found = rows.reduce(case.model.parameters(), values[-1].view(1))
        if not rows.is_due:
            assert found is None
            assert all(parameter.grad is None for parameter in case.model.parameters())
            continue
        wanted = tree_sum(each, lambda left, right: [a + b for a, b in zip(left, right, strict=True)])
        for parameter, grad in zip(case.model.parameters(), wanted, strict=True):
            assert torch.equal(parameter.grad, grad)
        assert torch.equal(found, torch.stack(values).view(3, 1))
        case.adam.step()
    assert {table.step for table in case.tables.values()} == {1}


def test_micro_batches_come_to_the_whole_batch():
    """But for rounding: the mean over the batch is the sum of those of its halves, each times its part."""
    halves = batches_of(2, size=6)
    whole = {name: np.concatenate([half[name] for half in halves]) for name in ("user", "item", "history", "label")}
    whole["words"] = hostdev.Bag(
        *(np.concatenate([getattr(half["words"], name) for half in halves]) for name in ("values", "lengths")),
        weights=np.concatenate([half["words"].weights for half in halves]),
    )
    wanted = Case(optimizer=cases.sgd, options={"depth": 0}).train([whole])
    case = Case(optimizer=cases.sgd, options={"depth": 0})
    for label, rows in case.loop(halves, micro_batches=2):
        step(case, label, rows)
        rows.reduce(case.model.parameters())
        if rows.is_due:
            case.adam.step()
    for name, table in case.tables.items():
        np.testing.assert_allclose(table.weights, wanted.tables[name].weights, rtol=1e-5, atol=1e-6)
    for one, other in zip(case.model.parameters(), wanted.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_micro_batch_without_samples():
    """It adds nothing, has 0 among the values, and is counted."""
    case = Case(options={"depth": 0})
    found = []
    for label, rows in case.loop([*batches_of(1), *batches_of(1, size=0)], micro_batches=2):
        value = None
        if len(label):
            step(case, label, rows, 1.0)
            value = torch.ones(())
        found.append(rows.reduce(case.model.parameters(), value))
        if rows.is_due:
            case.adam.step()
    assert found[0] is None
    assert found[1].tolist() == [1.0, 0.0]
    assert differing(case.state(), Case(options={"depth": 0}).train(batches_of(1)).state()) == []


def test_a_step_without_any_samples_changes_nothing():
    case = Case(options={"depth": 0})
    before = case.state()
    for _, rows in case.loop(batches_of(2, size=0), micro_batches=2):
        assert rows.reduce(case.model.parameters()) is None
    assert differing(case.state(), before) == []


def test_without_micro_batches_reduce_changes_nothing():
    """So that a loop may be written for both."""
    case, value = Case(options={"depth": 0}), torch.tensor([2.0, 3.0])
    for label, rows in case.loop(batches_of(3)):
        case.adam.zero_grad()
        cases.loss_of(case.model, rows, label).backward()
        assert rows.reduce(case.model.parameters(), value).tolist() == [[2.0, 3.0]]
        assert rows.reduce(case.model.parameters()) is None
        case.adam.step()
    assert differing(case.state(), cases.wanted_of(cases.CPU, batches_of(3))) == []


def test_the_unique_rows_of_a_micro_batch():
    """Each micro-batch's own rows, in order of occurrence."""
    case = Case(options={"depth": 0})
    batches = batches_of(2)
    for batch, rows in case.runtime.train(batches, ids=ids, micro_batches=2):
        unique, counts = rows.unique("users")
        wanted, first, uses = np.unique(batch["user"], return_index=True, return_counts=True)
        order = np.argsort(first)
        assert counts.tolist() == uses[order].tolist()
        np.testing.assert_array_equal(unique.detach(), case.tables["users"].weights[wanted[order]])
        rows.reduce(case.model.parameters())


@pytest.mark.parametrize("due", [False, True])
def test_a_forgotten_reduce(due):
    """With the first micro-batch of a step, or with the last one."""
    case, taken = Case(), 0
    with pytest.raises(ValueError, match=r"was not reduced: call rows.reduce\(model.parameters\(\)\) after"):
        for label, rows in case.loop(batches_of(4), micro_batches=2):
            taken += 1
            step(case, label, rows)
            if rows.is_due != due:
                rows.reduce(case.model.parameters())
            if rows.is_due:
                case.adam.step()
    assert taken == 1 + due
    assert {table.step for table in case.tables.values()} == {0}  # nor has a part of the step been taken


def test_a_loop_that_is_left_before_its_reduce_takes_no_step():
    case = Case()
    for label, rows in case.loop(batches_of(4), micro_batches=2):
        step(case, label, rows)
        if rows.is_due:
            case.adam.step()
            break
        rows.reduce(case.model.parameters())
    del rows
    assert {table.step for table in case.tables.values()} == {0}


def test_reduce_twice():
    case = Case()
    with pytest.raises(ValueError, match="called twice for a micro-batch"):
        for label, rows in case.loop(batches_of(2), micro_batches=2):
            step(case, label, rows)
            rows.reduce(case.model.parameters())
            rows.reduce(case.model.parameters())


@pytest.mark.parametrize("other", [lambda given: given[:1], lambda given: given[::-1], lambda given: []])
def test_other_parameters(other):
    case = Case()
    with pytest.raises(ValueError, match="got different parameters for micro-batches of one step"):
        for label, rows in case.loop(batches_of(2), micro_batches=2):
            step(case, label, rows)
            given = list(case.model.parameters())
            rows.reduce(other(given) if rows.is_due else given)


@pytest.mark.parametrize("depth", [0, 2])
def test_batches_that_end_within_a_step(depth):
    case = Case(options={"depth": depth})
    taken = 0
    with pytest.raises(ValueError, match="the batches end within a step, after 1 of 2 micro-batches"):
        for label, rows in case.loop(batches_of(5), micro_batches=2):
            step(case, label, rows)
            rows.reduce(case.model.parameters())
            if rows.is_due:
                case.adam.step()
            taken += 1
    assert taken == 4


def test_a_step_of_the_optimizer_with_each_micro_batch():
    case = Case()
    with pytest.raises(
        ValueError, match=r"an optimizer stepped too early, before the last of the batches .*rows.is_due"
    ):
        for label, rows in case.loop(batches_of(4), micro_batches=2):
            step(case, label, rows)
            case.adam.step()
            rows.reduce(case.model.parameters())
            if rows.is_due:
                case.adam.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate": 2, "micro_batches": 2}, "micro_batches and accumulate both set .*; give only one"),
        ({"micro_batches": 0}, "micro_batches must be a number of batches, 1 or more, not 0"),
        ({"accumulate": 0, "micro_batches": 2}, "accumulate must be a number of batches, 1 or more, not 0"),
    ],
)
def test_wrong_numbers(options, words):
    with pytest.raises(ValueError, match=words):
        Case().loop(batches_of(2), **options)


def test_accumulation_over_ranks_has_another_name(monkeypatch):
    case = Case()
    monkeypatch.setattr(case.runtime, "world", Second())
    with pytest.raises(ValueError, match=r"micro_batches=3 instead of accumulate=3"):
        case.loop(batches_of(3), accumulate=3)


class Second:
    """Return ranks of which this is the second, as far as a runtime asks before it meets them."""

    micro_batches = 1

    def part(self):
        return 1, 2


def made(part):
    return hostdev.HostTable(10, 2, hostdev.SGD(lr=0.1), name="t", part=part)


@pytest.mark.parametrize(
    ("part", "ranks", "words"),
    [
        (None, Second(), "table 't' holds all rows, but this is rank 1 of 2; create the table with part=ranks.part"),
        ((0, 2), Second(), "table 't' holds part 0 of 2, but this is rank 1 of 2"),
        ((1, 4), Second(), "table 't' holds part 1 of 4, but this is rank 1 of 2"),
        ((1, 2), None, "table 't' holds part 1 of 2, but there are no other ranks"),
    ],
)
def test_a_table_that_is_not_the_part_of_its_rank(part, ranks, words):
    with pytest.raises(ValueError, match=words):
        hostdev.Runtime({"f": made(part)}, device="cpu", ranks=ranks)


def test_a_table_on_the_device_has_no_part():
    table = hostdev.DeviceTable(10, 2, hostdev.SGD(lr=0.1), torch.device("cpu"), name="t")
    with pytest.raises(ValueError, match="table 't' holds all rows, but this is rank 1 of 2"):
        hostdev.Runtime({"f": table}, device="cpu", ranks=Second())
