"""Which batches change the tables, when and by how much: skipped ones, accumulated ones, frozen tables, schedules."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hostdev
from tests.runtime.cases import BF16, CACHES, ROWS, Case, Twin, batches_of, differing, loss_of, send, sgd, tables_state

SETTINGS = [(depth, cache) for depth in (0, 1, 2) for cache in CACHES]
overlapped = pytest.mark.parametrize(("depth", "cache"), SETTINGS)


@overlapped
def test_a_batch_without_backward_changes_nothing(device, depth, cache):
    batches, skipped = batches_of(10), {0, 3, 4, 9}
    wanted = Case(device, options={"depth": 0}).train(b for n, b in enumerate(batches) if n not in skipped)
    case = Case(device, options={"depth": depth, "cache": cache})
    for label, rows in case.loop(batches):
        if rows.step - 1 in skipped:
            loss_of(case.model, rows, label)  # a forward pass alone
        else:
            case.step(label, rows)
    assert differing(case.state(), wanted.state()) == []
    assert case.tables["users"].step == 6


@overlapped
@pytest.mark.parametrize("on_device", [(), pytest.param(("users", "items", "first"), marks=pytest.mark.slow)])
def test_bfloat16_weights_beside_others(device, depth, cache, on_device):
    """Groups of host tables and of device tables, a float32 table in a group, a batch that takes no step."""
    if on_device and isinstance(cache, dict):
        pytest.skip("a cache of tables that lie on the device")
    batches = batches_of(8)
    wanted = Case(device, bf16=BF16, options={"depth": 0}).train(b for n, b in enumerate(batches) if n != 4)
    case = Case(device, bf16=BF16, on_device=on_device, options={"depth": depth, "cache": cache})
    for label, rows in case.loop(batches):
        if rows.step != 5:
            case.step(label, rows)
    assert differing(case.state(), wanted.state()) == []
    weights = np.asarray(case.tables["words"].weights)
    assert not (weights.view(np.uint32) & np.uint32(0xFFFF)).any()


def test_batches_that_are_all_skipped(device):
    for depth, cache in SETTINGS[::4]:
        case = Case(device, options={"depth": depth, "cache": cache})
        before = case.state()
        assert sum(1 for _ in case.loop(batches_of(5))) == 5
        assert differing(case.state(), before) == []


def test_a_batch_that_is_given_up_after_backward(device):
    """Its gradients are set to None, those of the dense side by its optimizer."""
    batches = batches_of(6)
    wanted = Case(device).train(b for n, b in enumerate(batches) if n not in (0, 3)).state()
    for cache in CACHES:
        case = Case(device, options={"cache": cache})
        for label, rows in case.loop(batches):
            if rows.step - 1 not in (0, 3):
                case.step(label, rows)
                continue
            loss_of(case.model, rows, label).backward()
            for parameter in rows.parameters():
                parameter.grad = None
        assert differing(case.state(), wanted) == []


def test_tables_whose_rows_have_no_gradient_take_no_step(device):
    """One feature of a table is enough for a step; its other rows get a gradient of 0."""
    tables = []
    for depth, cache in SETTINGS[::4]:
        case = Case(device, options={"depth": depth, "cache": cache})
        for number, (_, rows) in enumerate(case.loop(batches_of(6))):
            loss = rows["history"].square().sum()
            if number % 2:
                loss = loss + rows["item"][1].sum()
            loss.backward()
        assert {name: table.step for name, table in case.tables.items()} == {
            "users": 0,
            "items": 6,
            "first": 3,
            "words": 0,
        }
        tables.append(tables_state(case.tables.values()))
    assert tables == [tables[0]] * len(tables)


def accumulated(case, batches, together, dense=None):
    """A loop that steps with the last of so many batches."""
    for label, rows in case.loop(batches, accumulate=together):
        (loss_of(case.model, rows, label) / together).backward()
        if rows.is_due:
            (dense or case.adam).step()
            (dense or case.adam).zero_grad()
    return case


@pytest.mark.parametrize("together", [2, 3])
def test_gradients_that_add_up(device, together):
    """Over 7 batches, so that the last step has one; as torch does, and the same bits at all depths and caches."""
    batches = batches_of(7)
    case = Case(device, sgd)
    dense = torch.optim.SGD(case.model.parameters(), lr=0.1)
    twin, model = Twin(case.tables), Case().model
    plain = torch.optim.SGD(
        [{"params": twin.parameters(), "lr": 0.3}, {"params": model.parameters(), "lr": 0.1}], lr=1.0
    )
    for number, batch in enumerate(batches, 1):
        (loss_of(model, twin(batch), send(batch)) / together).backward()
        if number % together == 0 or number == len(batches):
            plain.step()
            plain.zero_grad()
    accumulated(case, batches, together, dense)
    twin.assert_close(case.tables)
    for mine, theirs in zip(case.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())
    assert {table.step for table in case.tables.values()} == {-(-7 // together)}

    states = []
    for depth, cache in [(0, None), (2, None), (4, "20%"), (1, CACHES[2])]:
        other = accumulated(Case(device, options={"depth": depth, "cache": cache}), batches, together)
        states.append(other.state())
    assert [differing(state, states[0]) for state in states] == [[]] * 4


@pytest.mark.parametrize("first", [0, 2])
def test_gradients_that_were_not_to_add_up(device, first):
    """The dense side steps with every third batch; the tables would with each."""
    case = Case(device)
    with pytest.raises(ValueError, match=r". batch.* with gradients had no optimizer step.*accumulate=N"):
        for number, (label, rows) in enumerate(case.loop(batches_of(9))):
            loss_of(case.model, rows, label).backward()
            if number % 3 == first:
                case.adam.step()
                case.adam.zero_grad()
    case.train(batches_of(1))


def test_an_optimizer_that_steps_before_the_rows_are_due(device):
    case = Case(device)
    with pytest.raises(
        ValueError, match="an optimizer stepped too early, before the last of the batches .*rows.is_due"
    ):
        case.train(batches_of(4), accumulate=2)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)  # one that steps more often is none of ours
    for label, rows in case.loop(batches_of(4), accumulate=2):
        loss_of(case.model, rows, label).backward()
        other.step()
        if rows.is_due:
            case.adam.step()
    assert case.tables["users"].step == 2


def test_accumulation_of_no_batches():
    case = Case()
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"accumulate must be a number of batches, 1 or more, not {wrong}"):
            case.loop(batches_of(1), accumulate=wrong)


@pytest.mark.parametrize("cache", CACHES)
def test_frozen_tables(device, cache):
    """All of them, some of a group's, in the middle of a loop: from the next batch on."""
    case = Case(device, options={"cache": cache})
    batches = batches_of(9)
    steps = []
    for number, (label, rows) in enumerate(case.loop(batches)):
        case.step(label, rows)
        steps.append([case.runtime.settings.is_frozen(table) for table in case.tables.values()])
        if number == 1:
            case.runtime.freeze("items")  # a feature has it and another table
            assert case.runtime.settings.is_frozen(case.tables["items"])
        elif number == 3:
            case.runtime.freeze()
        elif number == 5:
            case.runtime.unfreeze("users", "first")
        elif number == 6:
            case.runtime.unfreeze()
    assert {name: table.step for name, table in case.tables.items()} == {"users": 7, "items": 4, "first": 7, "words": 6}
    plain = Case(device, options={"depth": 0})
    for number, (label, rows) in enumerate(plain.loop(batches)):
        loss = loss_of(plain.model, rows, label)
        plain.adam.zero_grad()
        frozen = {"items"} if number in (2, 3) else set(plain.tables) if number in (4, 5) else set()
        frozen = {"items", "words"} if number == 6 else frozen
        loss.backward()
        plain.adam.step()
        for leaf in rows.leaves:
            if leaf.table.name in frozen:
                leaf.rows.grad = None
    assert differing(case.state(), plain.state()) == []


def test_rows_of_frozen_tables_need_no_gradient(device):
    case = Case(device)
    case.runtime.freeze("items")
    for _, rows in case.loop(batches_of(1)):
        vector, first = rows["item"]
        assert [x.requires_grad for x in (vector, first, rows["history"], rows["user"])] == [False, True, False, True]
        assert len(rows.parameters()) == 3
    with pytest.raises(ValueError, match="no table 'itmes'; the tables are users, items, first, words"):
        case.runtime.freeze("itmes")


def schedule_of(kind, optimizer):
    if kind == "warm-up":
        return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, 8)
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.9, total_steps=10, cycle_momentum=False)


@pytest.mark.parametrize("kind", ["warm-up", "cosine", "one cycle"])
def test_schedules(device, kind):
    """As torch does with the tables as parameters; no warning; the rate of a batch's own turn, at every depth."""
    batches = batches_of(8)
    states = []
    for depth, cache in [(0, None), (1, None), (3, "20%")]:
        case = Case(device, sgd, options={"depth": depth, "cache": cache})
        twin, model = Twin(case.tables), Case().model
        schedule = schedule_of(kind, case.runtime.optimizer)
        for label, rows in case.loop(batches):
            case.step(label, rows)
            schedule.step()
        states.append(case.state())
        if depth:
            continue
        plain, adam = torch.optim.SGD(twin.parameters(), lr=0.3), torch.optim.Adam(model.parameters(), lr=0.02)
        schedule = schedule_of(kind, plain)
        for batch in batches:
            plain.zero_grad()
            adam.zero_grad()
            loss_of(model, twin(batch), send(batch)).backward()
            plain.step()
            adam.step()
            schedule.step()
        twin.assert_close(case.tables)
    assert [differing(state, states[0]) for state in states] == [[]] * 3


def test_a_schedule_of_one_table(device):
    case = Case(device, sgd)
    by_name = {group["name"]: group for group in case.runtime.optimizer.param_groups}
    assert list(by_name) == list(case.tables)
    before = tables_state(case.tables.values())
    lr_scheduler.LambdaLR(case.runtime.optimizer, [lambda step: 0.0, *[lambda step: 1.0] * 3])
    case.train(batches_of(3))
    changed = {name for name, what in differing(tables_state(case.tables.values()), before) if what == "weights"}
    assert changed == {"items", "first", "words"}
    assert [table.optimizer.lr for table in case.tables.values()] == [0.0, 0.3, 0.3, 0.3]


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_rate_that_is_set_at_the_table(device, with_optimizer):
    """From the next step on; a schedule goes on from it."""
    states = []
    for depth, cache in [(0, None), (2, None), (3, "20%")]:
        case = Case(device, sgd, options={"depth": depth, "cache": cache})
        if with_optimizer:
            assert case.runtime.optimizer.param_groups[0]["lr"] == 0.3
        for number, (label, rows) in enumerate(case.loop(batches_of(6))):
            if number == 3:
                case.runtime.write_back()
                before = case.tables["items"].weights.copy()
            case.step(label, rows)
            if number == 2:
                case.tables["items"].optimizer.lr = 0.0  # from the next batch on
        assert case.tables["items"].optimizer.lr == 0.0
        if with_optimizer:
            assert case.runtime.optimizer.param_groups[1]["lr"] == 0.0
        np.testing.assert_array_equal(case.tables["items"].weights, before)
        states.append(case.state())
    assert [differing(state, states[0]) for state in states] == [[]] * 3


def test_a_step_of_the_tables_optimizer_without_a_batch():
    case = Case()
    case.runtime.optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"runtime.optimizer.step\(\).* runtime.train\(\)"):
        case.runtime.optimizer.step()
    with pytest.raises(ValueError, match="lr must be positive"):  # FTRL's, which divides by it
        for label, rows in case.loop(batches_of(3)):
            case.step(label, rows)
            case.runtime.optimizer.param_groups[2]["lr"] = 0.0


def test_tables_that_share_an_optimizer():
    shared = sgd()
    case = Case(optimizer=lambda: shared)
    case.runtime.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match="table 'items' .* 0.3 .* 0.5; give"):
        case.train(batches_of(1))
    for group in case.runtime.optimizer.param_groups:
        group["lr"] = 0.5
    case.train(batches_of(1))
    assert shared.lr == 0.5
    shared.lr = 0.25
    case.train(batches_of(1))
    assert [group["lr"] for group in case.runtime.optimizer.param_groups] == [0.25] * 4


def test_a_rate_of_tables_that_share_an_optimizer_is_set_in_the_loop(device):
    states = []
    for depth in (0, 2):
        shared = hostdev.LazyAdam(lr=0.1)
        case = Case(device, optimizer=lambda shared=shared: shared, options={"depth": depth})
        for label, rows in case.loop(batches_of(6)):
            case.step(label, rows)
            shared.lr *= 0.5
        assert shared.lr == pytest.approx(0.1 / 64)
        states.append(case.state())
    assert differing(*states) == []


@pytest.mark.parametrize("cache", CACHES)
def test_gradients_of_rows_are_forgotten(device, cache):
    """By the `zero_grad` of the tables' optimizer, as the dense side's are by its own."""
    batches = batches_of(4)
    case = Case(device, options={"cache": cache})
    for label, rows in case.loop(batches):
        (3 * loss_of(case.model, rows, label)).backward(retain_graph=True)
        rows.parameters()
        case.runtime.optimizer.zero_grad()
        case.step(label, rows)
    assert differing(case.state(), Case(device).train(batches).state()) == []


def test_zero_grad_after_the_step_takes_nothing_back():
    """At the end of a body, where many clear the gradients."""
    batches, case = batches_of(4), Case()
    for label, rows in case.loop(batches):
        case.step(label, rows)
        case.runtime.optimizer.zero_grad()
    assert differing(case.state(), Case().train(batches).state()) == []


def test_the_state_of_a_schedule_goes_into_a_checkpoint():
    case = Case(optimizer=sgd)
    schedule = schedule_of("warm-up", case.runtime.optimizer)
    for label, rows in case.loop(batches_of(3)):
        case.step(label, rows)
        schedule.step()
    saved = case.runtime.optimizer.state_dict(), schedule.state_dict()
    other = Case(optimizer=sgd)
    schedule = schedule_of("warm-up", other.runtime.optimizer)
    other.runtime.optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    other.train(batches_of(1))
    assert [table.optimizer.lr for table in other.tables.values()] == pytest.approx([0.3 * 0.75] * 4)


def test_tables_on_both_sides(device):
    """Host tables and device tables in one model: the bits of all on one side, at any depth."""
    batches = batches_of(8)
    wanted = Case(device, options={"depth": 0}).train(batches).state()
    sides = [("users", "words"), ("items",), tuple(ROWS)]
    for on_device, depth, cache in itertools.product(sides, (0, 2), (None, 7)):
        if on_device == tuple(ROWS) and cache:
            continue
        case = Case(device, on_device=on_device, options={"depth": depth, "cache": cache}).train(batches)
        assert differing(case.state(), wanted) == [], (on_device, depth, cache)
