"""Hugging Face accelerate with a runtime: its prepared loaders show the body the state of its own batch."""

import warnings
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from tests.frameworks.cases import adam, ids, loader, loss_of, make_runtime, make_top, plain, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import send_to_device


@pytest.fixture
def make_accelerator():
    """Make an Accelerator, whose state is global to the process until the end of the test."""
    yield lambda **options: accelerate.Accelerator(cpu=True, **options)
    accelerate.state.GradientState._reset_state()
    accelerate.state.AcceleratorState._reset_state(True)


def generator(batches):
    yield from batches


def train(
    accelerator,
    epochs,
    accumulate,
    *,
    runtime=None,
    wrap=lambda batches: batches,
    folder=None,
    resume=None,
    inside=lambda: None,
):
    """Run the equivalent of `plain` in a loop as accelerate's users write it."""
    runtime, top = runtime or make_runtime(), make_top()
    optimizer, losses, steps = adam(top.parameters()), [], []
    top, optimizer, batches = accelerator.prepare(top, optimizer, loader())
    accelerator.register_save_state_pre_hook(lambda models, weights, to: runtime.save(Path(to) / "tables"))
    accelerator.register_load_state_pre_hook(lambda models, at: runtime.load(Path(at) / "tables"))
    if resume is not None:
        accelerator.load_state(resume)
    for _ in range(epochs):
        for batch, rows in runtime.train(wrap(batches), ids=ids, accumulate=accumulate, read_ahead=True):
            with accelerator.accumulate(top):
                loss = loss_of(top, batch, rows)
                accelerator.backward(loss)
                losses.append(loss.item())
                inside()
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_([*top.parameters(), *rows.parameters()], 0.02)
                    steps.append(len(losses))
                optimizer.step()
                optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state(folder)
    return losses, weights(runtime), steps


@pytest.mark.parametrize(("accumulate", "depth", "cache"), [(1, 2, None), (3, 0, None), (3, 4, "50%"), (7, 2, None)])
def test_the_loop_steps_where_it_does_without_reading_ahead(make_accelerator, accumulate, depth, cache):
    runtime = make_runtime(depth, cache)
    found = train(make_accelerator(gradient_accumulation_steps=accumulate), 2, accumulate, runtime=runtime)
    assert found == plain(2, accumulate=accumulate, clip=0.02)


@pytest.mark.parametrize(
    "wrap", [generator, iter, lambda batches: tqdm(batches, disable=True)], ids=["generator", "iterator", "tqdm"]
)
def test_a_prepared_loader_may_be_wrapped(make_accelerator, wrap):
    found = train(make_accelerator(gradient_accumulation_steps=3), 2, 3, wrap=wrap)
    assert found == plain(2, accumulate=3, clip=0.02)


def test_the_body_sees_the_state_of_its_batch(make_accelerator):
    accelerator, runtime, top = make_accelerator(), make_runtime(), make_top()
    state = accelerator.gradient_state
    batches, others = accelerator.prepare(loader(), loader(100))
    optimizer = adam(top.parameters())
    for _ in range(2):
        seen = []
        for batch, rows in runtime.train(batches, ids=ids):
            loss_of(top, batch, rows).backward()
            optimizer.step()
            inner = [(state.end_of_dataloader, state.remainder) for _ in runtime.predict(others, ids=ids)]
            assert inner == [(False, 50), (False, 50), (True, 50)]
            seen.append((state.in_dataloader, state.end_of_dataloader, state.remainder))
        assert seen == [(True, False, 10)] * 15 + [(True, True, 10)]
        assert not state.in_dataloader
    assert [state.end_of_dataloader for _ in batches] == [False] * 15 + [True]  # without a runtime, as before


@pytest.mark.parametrize("depth", [0, 2])
def test_accelerate_stays_as_it_was(make_accelerator, depth):
    """It is changed only while a loop reads a batch, and a loader that a loop has read is the program's again."""
    mixin = accelerate.data_loader.DataLoaderStateMixin
    begin, accelerator = mixin.begin, make_accelerator()
    batches, state = accelerator.prepare(loader()), accelerator.gradient_state
    for number, _ in enumerate(make_runtime(depth).predict(batches, ids=ids)):
        if number == 3:
            break
    assert mixin.begin is begin
    ends = []
    for _ in batches:
        assert state.active_dataloader is batches
        assert mixin.begin is begin
        ends.append(state.end_of_dataloader)
    assert ends == [False] * 15 + [True]
    assert type(batches.gradient_state) is type(state)
    assert not state.in_dataloader


def test_a_loop_that_goes_on_with_an_iterator_has_its_states(make_accelerator):
    accelerator, runtime = make_accelerator(), make_runtime()
    batches = iter(accelerator.prepare(loader()))
    seen = []
    for stop in (13, 100):
        for _ in runtime.train(batches, ids=ids, read_ahead=True):
            seen.append(accelerator.gradient_state.end_of_dataloader)
            if len(seen) == stop:
                break
        assert not accelerator.gradient_state.in_dataloader
    assert seen == [False] * 15 + [True]


def test_other_loaders_leave_accelerate_alone(make_accelerator):
    accelerator, runtime = make_accelerator(), make_runtime()
    for _ in accelerator.prepare(loader(100)):
        before = accelerator.gradient_state.active_dataloader
        for _ in runtime.predict(loader(), ids=ids):
            assert accelerator.gradient_state.active_dataloader is before


def test_a_state_that_is_loaded_goes_on(make_accelerator, tmp_path):
    def accelerator():
        return make_accelerator(gradient_accumulation_steps=3)

    first = train(accelerator(), 2, 3, folder=tmp_path / "state")
    then = train(accelerator(), 1, 3, folder=tmp_path / "state", resume=tmp_path / "state")
    losses, tables, _ = plain(3, accumulate=3, clip=0.02)
    assert first[0] + then[0] == losses
    assert then[1] == tables


def test_mixed_precision(make_accelerator):
    losses, _, _ = train(make_accelerator(gradient_accumulation_steps=3, mixed_precision="bf16"), 1, 3)
    assert losses == pytest.approx(plain(1, accumulate=3, clip=0.02)[0], abs=0.01)


def test_rows_are_handed_on():
    with make_runtime().train(loader(), ids=ids) as loop:
        _, rows = next(loop)
        assert send_to_device((rows,), torch.device("cpu"))[0] is rows


@pytest.mark.parametrize("use", ["train", "predict"])
@pytest.mark.parametrize("same_process", [True, False])
def test_a_state_without_the_tables_is_told(make_accelerator, tmp_path, use, same_process):
    accelerator, runtime, top = make_accelerator(), make_runtime(), make_top()
    optimizer = adam(top.parameters())
    top, optimizer, batches = accelerator.prepare(top, optimizer, loader())

    def step(runtime, top, optimizer):
        for batch, rows in runtime.train(batches, ids=ids):
            optimizer.zero_grad()
            accelerator.backward(loss_of(top, batch, rows))
            optimizer.step()

    step(runtime, top, optimizer)
    accelerator.save_state(tmp_path / "state")
    step(runtime, top, optimizer)
    accelerator.load_state(tmp_path / "state")
    if not same_process:
        accelerator.free_memory()
        runtime, top = make_runtime(), make_top()
        optimizer = adam(top.parameters())
        top, optimizer, batches = accelerator.prepare(top, optimizer, loader())
        accelerator.load_state(tmp_path / "state")
    with pytest.warns(UserWarning, match=f"'user', 'film' are at step {32 if same_process else 0}") as told:
        if use == "train":
            step(runtime, top, optimizer)
        else:
            list(runtime.predict(batches, ids=ids))
    assert len(told) == 1
