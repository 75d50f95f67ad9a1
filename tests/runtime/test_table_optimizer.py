"""What is refused of the tables' optimizer, and clips of gradients that leave the rows out."""

import math
import warnings

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import hostdev
from tests.runtime.cases import Case, batches_of, differing, ids, loss_of, send, sgd, tables_of

WRONG = {
    "weight_decay": (0.1, "table 'items': .* has weight_decay=0.1, which has no effect; only lr can be set there"),
    "momentum": (0.9, "table 'items': .* has momentum=0.9, which has no effect"),
    "betas": ((0.9, 0.999), r"table 'items': .* has betas=\(0.9, 0.999\), which has no effect"),
    "maximize": (True, "table 'items': .* has maximize=True, which has no effect"),
    "lr": (math.nan, "table 'items': .*rate.*nan"),
}
RATES = [math.inf, -1.0, "0.1", None, True, torch.ones(2), torch.tensor(math.nan), 1e-60, 1e60]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", WRONG)
def test_settings_of_a_group_that_have_no_effect(name, depth):
    """Before the next step, at the top of the body, and before the first: no row has changed, with or without Adam."""
    value, message = WRONG[name]
    for when in (0, 1, 2):
        for with_adam in (True, False):
            case = Case(optimizer=sgd, options={"depth": depth})
            group = case.runtime.optimizer.param_groups[1]
            if when == 0:
                group[name] = value
            with pytest.raises(ValueError, match=message):
                for label, rows in case.loop(batches_of(3)):
                    if when == 1 and rows.step == 2:
                        group[name] = value
                    loss_of(case.model, rows, label).backward()
                    if with_adam:
                        case.adam.step()
                        case.adam.zero_grad()
                    if when == 2 and rows.step == 1:
                        group[name] = value
            assert {table.step for table in case.tables.values()} == {min(when, 1)}


@pytest.mark.parametrize("rate", RATES, ids=str)
def test_rates_that_are_none(rate):
    case = Case(optimizer=sgd)
    case.runtime.optimizer.param_groups[1]["lr"] = rate
    with pytest.raises(ValueError, match="table 'items'"):
        case.train(batches_of(1))
    with pytest.raises(ValueError, match="table 'items'"):
        case.runtime.save("nowhere")
    assert case.tables["items"].step == 0


def test_settings_that_say_what_is_done_anyway():
    case = Case(optimizer=sgd)
    for group in case.runtime.optimizer.param_groups:
        group.update(weight_decay=0.0, momentum=0, maximize=False, lr=torch.tensor(0.3), initial_lr=0.3, mine="x")
    case.train(batches_of(3))
    assert differing(case.state(), Case(optimizer=sgd).train(batches_of(3)).state()) == []


def test_groups_that_are_added():
    case = Case(optimizer=sgd)
    with pytest.raises(ValueError, match="tables users, items, first, words,"):
        case.runtime.optimizer.add_param_group({"params": case.model.parameters()})
    case.train(batches_of(2))
    case.runtime.optimizer.param_groups.append({"params": [], "lr": 0.1, "name": "more"})
    with pytest.raises(
        ValueError, match="runtime.optimizer must keep its groups, one for each of the tables users, items, first, "
    ):
        case.train(batches_of(1))


def test_a_state_of_other_groups():
    """Rates go to the tables of their names, in whatever order; others are refused, and nothing changes."""
    case = Case(optimizer=sgd)
    state = case.runtime.optimizer.state_dict()
    state["param_groups"].reverse()
    for number, group in enumerate(state["param_groups"]):
        group["lr"] = 0.1 * (1 + number)
    case.runtime.optimizer.load_state_dict(state)
    case.train(batches_of(1))
    assert [table.optimizer.lr for table in case.tables.values()] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    for change, message in [
        (
            lambda groups: groups.pop(),
            "groups words, first, items, but runtime.optimizer has one group for each of the tables users,",
        ),
        (lambda groups: groups[0].update(name="other"), "groups other, first, items, users, but runtime.optimizer has"),
        (lambda groups: groups[0].pop("name"), "groups None, first"),
        (lambda groups: groups[0].update(lr=math.nan), "table 'words': .*rate .* not nan"),
        (lambda groups: groups[0].update(momentum=0.9), "table 'words': .* has momentum=0.9"),
    ]:
        wrong = case.runtime.optimizer.state_dict()
        wrong["param_groups"].reverse()
        change(wrong["param_groups"])
        with pytest.raises(ValueError, match=message):
            case.runtime.optimizer.load_state_dict(wrong)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1)) for _ in range(4)])
    with pytest.raises(ValueError, match="the state has the groups None, but runtime.optimizer"):
        case.runtime.optimizer.load_state_dict(adam.state_dict())
    assert [group["lr"] for group in case.runtime.optimizer.param_groups] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def clip_with_norm(parameters):
    parameters = list(parameters)
    norm = get_total_norm([p.grad for p in parameters])
    clip_grads_with_norm_(parameters, 1.0, norm)


CLIPS = {
    "clip_grad_norm_": lambda parameters: clip_grad_norm_(parameters, 1.0),
    "clip_grads_with_norm_": clip_with_norm,
    "clip_grad_value_": lambda parameters: clip_grad_value_(parameters, 0.01),
    "clip_grad_value_ foreach": lambda parameters: clip_grad_value_(parameters, 0.01, foreach=False),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clips_that_leave_the_rows_out(name):
    clip, case = CLIPS[name], Case()
    before = torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for label, rows in case.loop(batches_of(2)):
            loss_of(case.model, rows, label).backward()
            clip(case.model.parameters())
            clip([*case.model.parameters(), *rows.parameters()])
            get_total_norm([p.grad for p in case.model.parameters()])
            case.adam.step()
    assert ["clipped without the batch's rows" in str(one.message) for one in caught] == [True] * 2
    assert {one.filename for one in caught} == {__file__}
    assert torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype is before
    clip(case.model.parameters())  # no loop is open


def test_clips_of_several_models():
    """Each with a runtime of its own: the rows of the one are no part of the other's clip."""
    one, other = Case(), Case(seed=4)
    other.runtime = hostdev.Runtime({"user": tables_of(torch.device("cpu"))["users"]})
    second = other.runtime.train(batches_of(2), ids=lambda batch: {"user": batch["user"]})
    for (label, rows), (_, more) in zip(one.loop(batches_of(2)), second, strict=True):
        loss_of(one.model, rows, label).backward()
        more["user"].sum().backward()
        clip_grad_norm_([*one.model.parameters(), *rows.parameters()], 1.0)
        clip_grad_value_(more.parameters(), 1.0)
        one.adam.step()


def test_a_torch_without_the_function_that_clips_share(monkeypatch):
    monkeypatch.delattr(torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype")
    case = Case()
    with pytest.raises(
        RuntimeError, match=r"torch .* has no torch.nn.utils.clip_grad._group_tensors_by_device_and_dty"
    ):
        next(case.loop(batches_of(1)))
    monkeypatch.undo()
    case.train(batches_of(1))
    assert case.runtime.lookup(ids(batches_of(1)[0]))["user"].shape[0] == len(send(batches_of(1)[0]))
