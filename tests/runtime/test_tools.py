"""What torch has for loops: scaling of losses, clipping, default dtypes and devices."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from tests.combinations import pairs_first
from tests.runtime.cases import BF16, CACHES, Case, Twin, batches_of, differing, loss_of, send, sgd, tables_state

FUSED = pytest.mark.parametrize("fused", [False, True])


def scaled(case, batches, scaler, *, clip=False, spoil=None):
    """A loop with a GradScaler, as in torch's examples."""
    for label, rows in case.loop(batches):
        loss = loss_of(case.model, rows, label)
        case.adam.zero_grad()
        if spoil is not None:
            loss = spoil(rows, loss)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(case.adam)
            clip_grad_norm_([*case.model.parameters(), *rows.parameters()], 0.2)
        scaler.step(case.adam)
        scaler.update()
    return case


def scaler_of(device, scale=2.0**16, **options):
    return GradScaler(device.type, scale, growth_interval=3, **options)


@FUSED
def test_a_scaler_changes_no_bit(device, fused):
    """Powers of two are exact; the scale grows in between."""
    batches = batches_of(7)
    wanted = Case(device, adam={"fused": fused}, options={"depth": 0}).train(batches).state()
    for cache in CACHES:
        for enabled in (True, False):
            case = Case(device, adam={"fused": fused}, options={"cache": cache})
            scaler = scaler_of(device, enabled=enabled)
            assert differing(scaled(case, batches, scaler).state(), wanted) == []
            assert scaler.get_scale() == (2.0**18 if enabled else 1.0)


@pairs_first("fused, where, bf16", [False, True], ["dense", "rows", "a row alone"], [(), BF16])
def test_a_step_that_overflows_is_skipped(device, fused, where, bf16):
    """The dense side and the tables, whichever has the gradient that is not finite; the scale is lowered."""
    batches = batches_of(6)

    def spoil(rows, loss):
        if rows.step not in (1, 4):
            return loss
        if where == "rows":
            return loss + (rows["user"] * 3e38).sum()
        if where == "a row alone":
            return loss + (rows["words"] * 3e38)[0, 0]
        return loss + (case.model.top.weight * 3e38).sum()

    options = {"adam": {"fused": fused}, "bf16": bf16}
    wanted = Case(device, **options).train(b for n, b in enumerate(batches) if n not in (0, 3)).state()
    for cache in CACHES[:2]:
        case = Case(device, **options, options={"cache": cache})
        scaler = scaler_of(device, 2.0**10)
        scaled(case, batches, scaler, spoil=spoil)
        assert differing(case.state(), wanted) == []
        assert scaler.get_scale() == 2.0**8


def test_a_scaler_in_a_loop_without_an_optimizer():
    """Nobody calls `scaler.step`; the tables' gradients are divided all the same, and the next update is told."""
    batches, states, scaler = batches_of(5), [], None
    for scaler in (None, scaler_of(torch.device("cpu"), 2.0**10)):
        case = Case(optimizer=sgd)
        for _, rows in case.loop(batches):
            loss = rows["user"].square().sum() + rows["words"].exp().sum()
            if scaler is None:
                if rows.step != 2:
                    loss.backward()
                continue
            scaler.scale(loss * (3e38 if rows.step == 2 else 1)).backward()
        states.append(tables_state(case.tables.values()))
    assert differing(*states) == []
    scaler.update()
    assert scaler.get_scale() == 2.0**9


def test_gradients_that_were_not_to_add_up_with_a_scaler():
    case, scaler = Case(), scaler_of(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"runtime.train\(..., accumulate=N\)"):
        for label, rows in case.loop(batches_of(4)):
            scaler.scale(loss_of(case.model, rows, label)).backward()
            if rows.step % 2:
                scaler.step(case.adam)
                scaler.update()


def test_losses_that_were_scaled_differently():
    case = Case()
    one, two = GradScaler("cpu", 4.0), GradScaler("cpu", 8.0)
    with pytest.raises(ValueError, match="the losses of one step were scaled differently; use one GradScaler"):
        for _, rows in case.loop(batches_of(2)):
            one.scale(rows["user"].sum()).backward()
            two.scale(rows["words"].sum()).backward()


def test_a_scaler_and_gradients_that_add_up(device):
    batches, states = batches_of(5), []
    for scaler in (GradScaler(device.type, enabled=False), scaler_of(device)):
        case = Case(device, options={"cache": "20%"})
        for label, rows in case.loop(batches, accumulate=2):
            scaler.scale(loss_of(case.model, rows, label)).backward()
            if rows.is_due:
                scaler.step(case.adam)
                scaler.update()
                case.adam.zero_grad()
        states.append(case.state())
    assert differing(*states) == []
    assert case.tables["users"].step == 3


def clipped(case, batches, norms, most=0.05):
    for label, rows in case.loop(batches):
        loss = loss_of(case.model, rows, label)
        case.adam.zero_grad()
        loss.backward()
        norms.append(clip_grad_norm_([*case.model.parameters(), *rows.parameters()], most))
        case.adam.step()
    return case


@FUSED
@pytest.mark.parametrize("first", [False, True])
def test_a_scaler_of_another_model(device, fused, first):
    """It has not scaled the loss that the rows are in, and its overflows are not theirs."""
    batches = batches_of(5)
    wanted = Case(device).train(batches).state()
    case, scaler = Case(device), scaler_of(device)
    other = nn.Linear(1, 1).to(device)
    adam = torch.optim.Adam(other.parameters(), fused=fused)

    def train_other(factor):
        adam.zero_grad()
        scaler.scale(factor * other(torch.ones(1, 1, device=device)).sum()).backward()
        scaler.step(adam)
        scaler.update()

    for label, rows in case.loop(batches):
        if first:
            train_other(float("inf") if rows.step == 3 else 1.0)
        case.step(label, rows)
        if not first:
            train_other(float("inf") if rows.step == 3 else 1.0)
    assert scaler.get_scale() == 2.0**15
    assert differing(case.state(), wanted) == []


def test_a_scaler_of_another_thread(device):
    case, scaler = Case(device), scaler_of(device)
    batches = batches_of(4)
    for label, rows in case.loop(batches):
        thread = threading.Thread(target=lambda: scaler.scale(torch.ones(1, device=device)))
        thread.start()
        thread.join()
        case.step(label, rows)
    assert differing(case.state(), Case(device).train(batches).state()) == []


def test_losses_of_which_some_were_scaled(device):
    case, scaler = Case(device), scaler_of(device)
    with pytest.raises(ValueError, match="from scaled and from unscaled losses"):
        for label, rows in case.loop(batches_of(2)):
            loss = loss_of(case.model, rows, label)
            scaler.scale(loss).backward(retain_graph=True)
            loss.backward()
            scaler.step(case.adam)
            scaler.update()


def test_gradients_that_were_forgotten_were_not_scaled_differently(device):
    batches, case, scaler = batches_of(3), Case(device), scaler_of(device)
    for label, rows in case.loop(batches):
        case.adam.zero_grad()
        loss = loss_of(case.model, rows, label)
        scaled_loss = scaler.scale(loss)
        loss.backward(retain_graph=True)
        case.adam.zero_grad()
        case.runtime.optimizer.zero_grad()
        scaled_loss.backward()
        scaler.step(case.adam)
        scaler.update()
    assert differing(case.state(), Case(device).train(batches).state()) == []


def test_clipping_over_the_whole_model(device):
    """As torch does with the tables as parameters; the same bits with caches of any size."""
    batches, norms, expected = batches_of(6), [], []
    case = Case(device, sgd)
    twin, plain = Twin(case.tables), Case()
    rates = torch.optim.SGD(twin.parameters(), lr=0.3)
    for batch in batches:
        rates.zero_grad()
        plain.adam.zero_grad()
        loss_of(plain.model, twin(batch), send(batch)).backward()
        expected.append(clip_grad_norm_([*plain.model.parameters(), *twin.parameters()], 0.05))
        rates.step()
        plain.adam.step()
    clipped(case, batches, norms)
    twin.assert_close(case.tables)
    torch.testing.assert_close(torch.stack(norms).cpu(), torch.stack(expected))
    assert min(norms) > 0.1

    wanted = None
    for cache in (None, 3, "20%", "100%"):
        for depth in (0, 2):
            found, other = [], Case(device, options={"cache": cache, "depth": depth})
            state = clipped(other, batches, found).state()
            wanted = wanted or (state, found)
            assert differing(state, wanted[0]) == []
            assert [x.item() for x in found] == [x.item() for x in wanted[1]]


@FUSED
def test_clipping_of_scaled_gradients(device, fused):
    batches = batches_of(5)
    states = []
    for cache in (None, "20%"):
        for scaler in (scaler_of(device, enabled=False), scaler_of(device)):
            case = Case(device, adam={"fused": fused}, options={"cache": cache})
            states.append(scaled(case, batches, scaler, clip=True).state())
    assert [differing(state, states[0]) for state in states] == [[]] * 4


def test_a_clip_that_leaves_the_rows_out():
    case = Case()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for label, rows in case.loop(batches_of(4)):
            loss_of(case.model, rows, label).backward()
            clip_grad_norm_(case.model.parameters(), 1.0)
            case.adam.step()
    assert len(caught) == 1
    assert "gradients were clipped without the batch's rows" in str(caught[0].message)
    assert caught[0].filename == __file__
    clip_grad_norm_(case.model.parameters(), 1.0)  # no loop is open
    for label, rows in case.loop(batches_of(2)):
        with torch.no_grad():
            loss_of(case.model, rows, label)
        clip_grad_norm_(case.model.parameters(), 1.0)  # and no row has a gradient


@pytest.mark.parametrize("when", ["before", "between", "after each"])
def test_parameters_that_were_asked_for_early(device, when):
    """Before a backward pass, or between two: gradients come to them all the same, with a cache and without."""
    batches, wanted = batches_of(5), None
    for cache in CACHES:
        case, norms = Case(device, options={"cache": cache}), []
        for label, rows in case.loop(batches):
            case.adam.zero_grad()
            asked = rows.parameters() if when == "before" else None
            loss_of(case.model, rows, label).backward()
            if when != "before":
                asked = rows.parameters()
                norms.append(clip_grad_norm_(asked, 0.01).item())
            rows["user"].square().sum().backward()
            rows["history"].sum().backward()
            if when == "after each":
                assert all(one is other for one, other in zip(asked, rows.parameters(), strict=True))
            norms.append(clip_grad_norm_([*case.model.parameters(), *asked], 0.05).item())
            case.adam.step()
        wanted = wanted or (case.state(), norms)
        assert differing(case.state(), wanted[0]) == []
        assert norms == wanted[1]


def test_gradients_that_are_put_there_by_hand(device):
    """In place, or as a tensor in another layout."""
    states = []
    for cache in (None, "20%"):
        case = Case(device, sgd, options={"cache": cache})
        for label, rows in case.loop(batches_of(3)):
            loss_of(case.model, rows, label).backward()
            for parameter in rows.parameters():
                parameter.grad.mul_(2.0)
                parameter.grad = (parameter.grad + 1.0).T.contiguous().T
            case.adam.step()
        states.append(case.state())
    assert differing(*states) == []


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
def test_a_default_dtype_of_the_users_changes_no_bit():
    """On the CPU, as the simulated accelerator takes numbers in operations for tensors of this dtype."""
    batches, device = batches_of(4), torch.device("cpu")
    states = []
    for dtype in (torch.get_default_dtype(), torch.float32):
        torch.set_default_dtype(dtype)
        for cache in (None, "20%"):
            case = Case(device, options={"cache": cache}, on_device=("words",))
            case.model.float()
            scaled(case, batches, scaler_of(device), clip=True)
            states.append({name: bits for name, bits in case.state().items() if "step" not in name})  # torch's dtype
    assert [differing(state, states[0]) for state in states] == [[]] * 4


def test_a_default_device_of_the_users(device):
    """`torch.set_default_device`, under which every new tensor is on the accelerator."""
    batches = batches_of(4)
    for depth in (0, 2):
        case = Case(device, options={"cache": "20%", "depth": depth})
        with torch.device(device):
            case.train(batches)
        assert differing(case.state(), Case(device).train(batches).state()) == []


def test_somebody_else_wraps_backward_while_a_loop_is_open(monkeypatch):
    """A profiler: another loop, within or after it, would have called itself without an end."""
    batches, calls = batches_of(3), []
    before = torch.autograd.backward
    case, other = Case("cpu"), Case("cpu")
    for label, rows in case.loop(batches):
        if rows.step == 1:
            seen = torch.autograd.backward
            monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: (calls.append(1), seen(*a, **k))[1])  # noqa: B023
            other.train(batches[:2])
        case.step(label, rows)
    case.train(batches[:1])
    assert len(calls) == 6
    monkeypatch.undo()
    case.train(batches[:1])
    assert torch.autograd.backward is before
