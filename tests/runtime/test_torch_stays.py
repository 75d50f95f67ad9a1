"""Opening a loop leaves torch as it was: its functions, classes and hooks are the same objects afterwards."""

import gc
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.utils.clip_grad
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR

import hostdev
from tests.runtime.cases import CACHES, BodyError, Case, batches_of, differing, ids, loss_of, send, sgd

HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def torch_objects():
    """What hostdev could change of torch, by name."""
    modules = [torch.nn.utils, torch.nn.utils.clip_grad, torch.autograd, torch_optimizer, torch.amp.grad_scaler]
    owners = [torch.amp.GradScaler, torch.optim.Optimizer, torch.optim.Adam, torch.optim.SGD, *modules]
    found = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    for hooks in HOOKS:
        found |= {f"{hooks} {key}": value for key, value in getattr(torch_optimizer, hooks).items()}
    varies = ("__dict__", "__warningregistry__")
    return {
        name: value
        for name, value in found.items()
        if not (name.endswith(varies) or isinstance(value, types.ModuleType))
    }


@pytest.fixture(scope="module", autouse=True)
def _few_objects():
    """Exempt what other tests have left from garbage collections, of which each test here has several."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _torch_stays():
    gc.collect()
    Case()  # torch wraps `step` of an optimizer's class when the first one is made
    before = torch_objects()
    yield
    gc.collect()
    after = torch_objects()
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if value is not after[name]] == []


def is_patched():
    return GradScaler.scale.__module__ != "torch.amp.grad_scaler" or hasattr(GradScaler.scale, "__wrapped__")


def test_a_loop_to_its_end():
    case = Case()
    for label, rows in case.loop(batches_of(3)):
        assert is_patched()
        case.step(label, rows)
    assert not is_patched()


@pytest.mark.parametrize("how", ["break", "exception", "close", "dropped", "with", "generator"])
def test_a_loop_that_is_left(how):
    case, other = Case(), Case(seed=4)
    loop = case.loop(batches_of(5))
    if how in ("break", "exception"):
        with pytest.raises(BodyError) if how == "exception" else torch.enable_grad():
            for label, rows in case.loop(batches_of(5)):
                case.step(label, rows)
                other.train(batches_of(2))  # another loop begins and ends within it
                assert is_patched()
                if how == "break":
                    break
                raise BodyError
    elif how == "with":
        with loop:
            case.step(*next(loop))
    elif how == "generator":
        case.step(*next(item for item in loop))
    else:
        case.step(*next(loop))
        if how == "close":
            loop.close()
    del loop
    gc.collect()
    assert not is_patched()


def test_frameworks_loaders():
    case, own = Case(), torch.nn.utils.clip_grad_norm_
    for label, rows in case.runtime.train_loader(batches_of(3), ids=ids, send=send):
        assert torch.nn.utils.clip_grad_norm_ is not own
        case.step(label, rows)
    assert torch.nn.utils.clip_grad_norm_ is own


@pytest.mark.parametrize("how", ["zero_grad", "closed", "load", "a loop", "dropped"])
@pytest.mark.parametrize("schedule", [False, True])
def test_gradients_that_were_left_without_a_step(how, schedule, tmp_path):
    """torch is not watched until they are told, and nothing is placed on the optimizer that has its own."""
    case = Case()
    case.runtime.save(tmp_path)
    if schedule:
        StepLR(case.adam, 1)
    step = case.adam.step
    for label, rows in case.loop(batches_of(3)):
        loss_of(case.model, rows, label).backward()
        break
    assert not is_patched()
    uses = {
        "zero_grad": lambda: case.runtime.optimizer.zero_grad(),
        "closed": lambda: case.runtime.close(),
        "load": lambda: case.runtime.load(tmp_path),
        "a loop": lambda: case.train(batches_of(1)),
        "dropped": lambda: None,
    }
    with (
        pytest.warns(UserWarning, match="left without a step") if how not in ("zero_grad", "dropped") else nullcontext()
    ):
        uses[how]()
    assert not is_patched()
    assert case.adam.step == step


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (GradScaler, "scale"),
        (GradScaler, "unscale_"),
        (GradScaler, "_check_inf_per_device"),
        (torch.autograd, "backward"),
        (torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype"),
    ],
)
def test_a_torch_without_a_hook(monkeypatch, owner, name):
    """An error, and torch is as it was."""
    case = Case()
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(RuntimeError, match=rf"torch {torch.__version__.split('+')[0]}.*{owner.__name__}\.{name}"):
            next(case.loop(batches_of(1)))
        assert hasattr(torch.nn.utils.clip_grad._clip_grads_with_norm_, "__wrapped__")  # torch's own decorator
    assert not is_patched()
    case.train(batches_of(1))


def scaled(case, batches, scaler, order, spoil=lambda rows, loss: loss):
    """A loop in which the scaler gets the tables' optimizer, too."""
    optimizers = [case.adam, case.runtime.optimizer][:: 1 if order == "dense first" else -1]
    for label, rows in case.loop(batches):
        loss = spoil(rows, loss_of(case.model, rows, label))
        for one in optimizers:
            one.zero_grad()
        scaler.scale(loss).backward()
        if rows.step % 2:
            for one in optimizers:
                scaler.unscale_(one)
            parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
            clip_grad_norm_([*case.model.parameters(), *rows.parameters()], 0.2)
            assert {id(one) for one in rows.parameters()} <= {id(one) for one in parameters}
        for one in optimizers:
            scaler.step(one)
        scaler.update()
    return case


@pytest.mark.parametrize("order", ["dense first", "tables first"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_scaler_that_gets_the_tables_optimizer(device, cache, order):
    """The bits are those without a scaler, and the gradients are divided once."""
    batches = batches_of(6)
    states = []
    for enabled in (False, True):
        case, scaler = Case(device, options={"cache": cache}), GradScaler(device.type, 2.0**10, enabled=enabled)
        states.append(scaled(case, batches, scaler, order).state())
    assert differing(*states) == []


@pytest.mark.parametrize("order", ["dense first", "tables first"])
@pytest.mark.parametrize("where", ["dense", "rows"])
def test_an_overflow_skips_both(device, where, order):
    batches = batches_of(6)

    def spoil(rows, loss):
        if rows.step not in (1, 4):
            return loss
        return loss + (rows["user"] if where == "rows" else case.model.top.weight).mul(3e38).sum()

    case, scaler = Case(device, options={"cache": "20%"}), GradScaler(device.type, 2.0**10)
    scaled(case, batches, scaler, order, spoil)
    assert scaler.get_scale() == 2.0**8
    assert case.tables["users"].step == 4


def test_a_loop_that_the_tables_optimizer_steps():
    """It counts as the step, as a dense optimizer's does; a batch without it is refused."""
    batches, states = batches_of(4), []
    for by_hand in (False, True):
        case = Case(optimizer=sgd)
        for _, rows in case.loop(batches):
            case.runtime.optimizer.zero_grad()
            rows["user"].square().sum().backward()
            if by_hand:
                assert case.runtime.optimizer.step(lambda: 3.0) == 3.0
        states.append(case.state())
    assert differing(*states) == []
    with pytest.raises(ValueError, match=r"accumulate=N"):
        for _, rows in case.loop(batches):
            rows["user"].square().sum().backward()
            if rows.step != 2:
                case.runtime.optimizer.step()


def test_the_parameters_of_the_tables_optimizer():
    """The batch's rows in the body, an empty tensor elsewhere; a state has one parameter a table at any time."""
    case = Case(options={"cache": "20%"})
    groups = case.runtime.optimizer.param_groups
    case.runtime.freeze("words")
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [[(0,)]] * 4
    for label, rows in case.loop(batches_of(2)):
        state = case.runtime.optimizer.state_dict()
        loss_of(case.model, rows, label).backward()
        assert [id(group["params"][0]) for group in groups[:3]] == [id(p) for p in rows.parameters()]
        assert groups[3]["params"][0].shape == (0,)
        case.adam.step()
        case.adam.zero_grad()
        case.runtime.optimizer.load_state_dict(state)
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [[(0,)]] * 4
    assert isinstance(case.runtime.optimizer, torch.optim.Optimizer)
    assert hostdev.Runtime is type(case.runtime)
