"""Evaluation within training, and what else looks at the tables while a loop is open."""

import contextlib

import numpy as np
import pytest
import torch

import hostdev
from hostdev import Runtime
from tests.runtime.cases import Case, Twin, batches_of, differing, features_of, ids, loss_of, overlapped, send


def logits_of(case, batches):
    with torch.no_grad():
        return [case.model(rows).cpu() for _, rows in case.runtime.predict(batches, ids=ids, send=send)]


def plain_logits(case, batches):
    """Of the tables as they are, without the runtime."""
    twin = Twin(case.tables)
    model = Case(tables=None).model
    model.load_state_dict({name: value.cpu() for name, value in case.model.state_dict().items()})
    with torch.no_grad():
        return [model(twin(batch)) for batch in batches]


def equal(one, other):
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@overlapped
def test_predictions_are_those_of_the_steps_so_far(device, depth, cache, mode):
    """Before backward, between it and the step, after the step; and training goes on as if nobody had looked."""
    batches, seen = batches_of(8), []
    reference = Case(device, options={"depth": 0})
    wanted = [logits_of(reference, batches[:3])]
    for label, rows in reference.loop(batches):
        reference.step(label, rows)
        if rows.step in (2, 3):
            reference.runtime.write_back()
            wanted.append(logits_of(reference, batches[:3]))
            close = plain_logits(reference, batches[:3])
            for one, other in zip(wanted[-1], close, strict=True):
                torch.testing.assert_close(one, other)

    case = Case(device, options={"depth": depth, "cache": cache})
    with mode():
        seen.append(logits_of(case, batches[:3]))
    for label, rows in case.loop(batches):
        loss = loss_of(case.model, rows, label)
        if rows.step == 3:
            with mode():
                seen.append(logits_of(case, batches[:3]))
        case.adam.zero_grad()
        loss.backward()
        if rows.step == 3:
            with mode():
                seen.append(logits_of(case, batches[:3]))
        case.adam.step()
        if rows.step == 3:
            with mode():
                seen.append(logits_of(case, batches[:3]))
                seen.append(logits_of(case, batches[:3]))
    assert [equal(seen[0], wanted[0]), equal(seen[1], wanted[1]), equal(seen[2], wanted[1])] == [True] * 3
    assert [equal(seen[3], wanted[2]), equal(seen[4], wanted[2])] == [True] * 2
    assert not equal(wanted[1], wanted[2])
    assert differing(case.state(), reference.state()) == []


def test_predictions_before_the_first_step(device):
    """After backward, when it is not known yet whether there is an optimizer."""
    batches = batches_of(3)
    case = Case(device)
    before = logits_of(case, batches)
    for label, rows in case.loop(batches):
        case.adam.zero_grad()
        loss_of(case.model, rows, label).backward()
        if rows.step == 1:
            assert equal(logits_of(case, batches), before)
        case.adam.step()
    assert differing(case.state(), Case(device).train(batches).state()) == []


def test_predictions_while_gradients_add_up(device):
    batches, seen = batches_of(6), []
    case = Case(device, options={"cache": "20%"})
    for label, rows in case.loop(batches, accumulate=2):
        loss_of(case.model, rows, label).backward()
        if rows.is_due:
            case.adam.step()
            case.adam.zero_grad()
        seen.append((case.tables["users"].step, logits_of(case, batches[:2])))
    for earlier, later, changes in zip(seen, seen[1:], [True, False] * 3, strict=False):
        assert equal(earlier[1], later[1]) != changes
    other = Case(device)
    for label, rows in other.loop(batches, accumulate=2):
        loss_of(other.model, rows, label).backward()
        if rows.is_due:
            other.adam.step()
            other.adam.zero_grad()
    assert differing(case.state(), other.state()) == []


@overlapped
def test_gradients_after_an_evaluation_are_refused(device, depth, cache):
    """It has seen the batch as finished; with parameters that were asked for, too, which is no gradient."""
    case = Case(device, options={"depth": depth, "cache": cache})
    with pytest.raises(ValueError, match="a batch got gradients after an evaluation, or a read"):
        for label, rows in case.loop(batches_of(4)):
            more = rows["user"].sum()
            loss_of(case.model, rows, label).backward()
            rows.parameters()
            case.adam.step()
            if rows.step > 1:
                logits_of(case, batches_of(1))
            if rows.step == 3:
                more.backward()
                with pytest.raises(ValueError, match="this batch is over: .* an evaluation"):
                    rows["user"]
    assert case.tables["users"].step == 3


@pytest.mark.slow_on_standin
@overlapped
def test_writing_back_in_the_middle(device, depth, cache):
    """The host's tables are then those of the steps so far."""
    batches = batches_of(8)
    case = Case(device, options={"depth": depth, "cache": cache})
    case.runtime.write_back()
    for label, rows in case.loop(batches):
        case.step(label, rows)
        if rows.step in (1, 4, 5, 8):
            case.runtime.write_back()
            assert differing(case.state(), Case(device).train(batches[: rows.step]).state()) == []
    assert differing(case.state(), Case(device).train(batches).state()) == []


def test_looking_up_a_batch(device):
    case = Case(device, options={"cache": "20%"})
    batches = batches_of(3)
    for label, rows in case.loop(batches):
        case.step(label, rows)
        found = case.runtime.lookup(ids(batches[0]))
        assert sorted(found) == ["history", "item", "user", "words"]
        case.runtime.write_back()
        twin = Twin(case.tables)(batches[0])
        torch.testing.assert_close(found["words"].cpu(), twin["words"].detach())
        torch.testing.assert_close(found["item"][1].cpu(), twin["item"][1].detach())
        assert not found["user"].requires_grad
    with pytest.raises(ValueError, match="batch 1: no ids for the features user"):
        case.runtime.lookup({"item": [1], "history": [[1]], "words": ([1], [1])})


def test_what_is_refused_while_loops_are_open(device):
    batches = batches_of(4)
    case = Case(device, options={"cache": "20%"})
    training = case.loop(batches)
    case.step(*next(training))
    with pytest.raises(ValueError, match=r"a loop over `train` is open; end it, or call its close\(\)"):
        case.train(batches)
    predicting = case.runtime.predict(batches, ids=ids)
    next(predicting)
    with pytest.raises(ValueError, match="a loop over `predict` is open; .* before the next step of `train`"):
        next(training)
    predicting.close()
    case.step(*next(training))
    training.close()
    predicting = case.runtime.predict(batches, ids=ids)
    next(predicting)
    with pytest.raises(
        ValueError, match="a loop over `predict` is open; end it, or call its close.*before the next step of"
    ):
        case.train(batches)
    del predicting
    case.train(batches[2:])
    assert differing(case.state(), Case(device).train(batches).state()) == []


def test_two_predictions_at_once(device):
    batches = batches_of(5)
    case = Case(device, options={"cache": "20%"}).train(batches)
    wanted = logits_of(case, batches)
    both = [[], []]
    for one, other in zip(*(case.runtime.predict(batches, ids=ids) for _ in range(2)), strict=True):
        for found, (_, rows) in zip(both, (one, other), strict=True):
            found.append(case.model(rows).detach().cpu())
    assert equal(both[0], wanted)
    assert equal(both[1], wanted)


def test_predictions_cannot_be_learned_from(device):
    case = Case(device)
    for _, rows in case.runtime.predict(batches_of(2), ids=ids):
        assert not rows["user"].requires_grad
        assert rows.parameters() == []
        with pytest.raises(ValueError, match="guard\\(\\) was called in a loop over `predict`, which takes no steps"):
            rows.guard(case.adam, [], [], list)
    for count in (0, 1, 3):  # breaking off, and an error, end it
        for _, rows in case.runtime.predict(batches_of(3), ids=ids):
            if rows.step == count:
                break
        assert case.runtime.loops.predicting == 0


@pytest.mark.parametrize("cache", [None, "30%"])
def test_two_runtimes_with_one_table(device, cache):
    """Not at once; one after the other, with caches, of which each forgets what the other one has changed."""
    batches = batches_of(8)
    case = Case(device, options={"cache": cache})
    other = Runtime(features_of(case.tables), device=device, cache=cache)
    for label, rows in case.loop(batches[:2]):
        case.step(label, rows)
        with pytest.raises(ValueError, match="table 'users' is being trained by a loop of another runtime"):
            next(other.train(batches, ids=ids))
        with pytest.raises(ValueError, match="table 'users' is being trained by a loop of another runtime"):
            other.lookup(ids(batches[0]))
    for number, runtime in enumerate((other, case.runtime, other), 1):
        for label, rows in runtime.train(batches[2 * number : 2 * number + 2], ids=ids, send=send):
            case.step(label, rows)
    assert differing(case.state(), Case(device).train(batches).state()) == []


def test_tables_that_are_changed_by_other_means(device):
    """As after loading a checkpoint, between two loops."""
    batches = batches_of(6)
    states = []
    for cache in (None, "50%"):
        case = Case(device, options={"cache": cache})
        case.train(batches[:3])
        for table in case.tables.values():
            with table.writing() as w:
                w.weights[:] = np.float32(0.25)
        case.train(batches[3:])
        states.append(case.state())
    assert differing(*states) == []


def test_runtimes_tell_of_their_tables(device):
    case = Case(device, options={"cache": "20%"})
    assert list(case.runtime.tables) == ["users", "items", "first", "words"]
    assert [cache.capacity for cache in case.runtime.caches] == [8, 12, 12, 6]
    assert [[table.name for table in cache.tables] for cache in case.runtime.caches] == [
        ["users"],
        ["items"],
        ["first"],
        ["words"],
    ]
    assert case.runtime.device == device
    assert hostdev.Runtime({"x": case.tables["users"]}, device=device).caches == []
