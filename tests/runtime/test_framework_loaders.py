"""`Runtime.train_loader` and `predict_loader`: what trainers iterate over, without a trainer."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.frameworks.cases import adam, ids, loader, loss_of, make_runtime, make_top, plain, weights


class Stream(IterableDataset):
    own_generators = False

    def __iter__(self):
        return iter(loader().dataset)


def steps(top, optimizer, batches, losses):
    """Train on some batches as a trainer does."""
    for batch, rows in batches:
        optimizer.zero_grad()
        loss = loss_of(top, batch, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(top.parameters(), 0.02)
        optimizer.step()
        losses.append(loss.item())


def train(runtime, batches, epochs):
    top, losses = make_top(), []
    optimizer = adam(top.parameters())
    for _ in range(epochs):
        steps(top, optimizer, batches, losses)
    return losses, weights(runtime)


def test_each_iteration_is_an_epoch():
    runtime = make_runtime()
    batches = runtime.train_loader(loader(), ids=ids)
    assert len(batches) == 16
    assert train(runtime, batches, 3) == plain(3, clip=0.02)[:2]


def test_a_trainer_need_not_ask_for_more_than_the_length():
    runtime, top, losses = make_runtime(), make_top(), []
    batches, optimizer = runtime.train_loader(loader(), ids=ids), adam(top.parameters())
    for _ in range(2):
        iterator = iter(batches)
        steps(top, optimizer, (next(iterator) for _ in range(len(batches))), losses)
    assert (losses, weights(runtime)) == plain(2, clip=0.02)[:2]


@pytest.mark.parametrize("depth", [0, 2, 4])
def test_epochs_of_an_iterator_go_on_where_the_one_before_ended(depth):
    runtime = make_runtime(depth)
    stream = iter([batch for _ in range(3) for batch in loader()])
    assert train(runtime, runtime.train_loader(stream, ids=ids, length=8), 6) == plain(3, clip=0.02)[:2]


def test_a_loader_without_a_length():
    runtime, stream = make_runtime(), DataLoader(Stream(), batch_size=16)
    with pytest.raises(TypeError, match=r"the loader, a generator, has no len\(\): .*length=N"):
        runtime.train_loader((batch for batch in loader()), ids=ids)
    with pytest.raises(TypeError, match=r"a DataLoader, has no len\(\): .*length=N"):
        runtime.predict_loader(stream, ids=ids)
    assert train(runtime, runtime.train_loader(stream, ids=ids, length=16), 2) == plain(2, clip=0.02)[:2]
    assert len(list(runtime.predict_loader(stream, ids=ids, length=3))) == 3


def test_errors():
    runtime = make_runtime()
    with pytest.raises(ValueError, match="the loader ended after 16 batches, but an epoch has 17"):
        train(runtime, runtime.train_loader(loader(), ids=ids, length=17), 1)
    with pytest.raises(ValueError, match="length=5 .* accumulate=2"):
        runtime.train_loader(iter(loader()), ids=ids, length=5, accumulate=2)
    for length in (0, 2.5, True):
        with pytest.raises(ValueError, match="length .* number of batches, 1 or more, not "):
            runtime.predict_loader(loader(), ids=ids, length=length)


def test_loops_that_a_trainer_leaves_open_are_closed():
    runtime, top = make_runtime(), make_top()
    evaluation, batches = runtime.predict_loader(loader(100), ids=ids), runtime.train_loader(loader(), ids=ids)
    checked = iter(evaluation)
    next(checked)  # as Lightning's sanity check
    assert train(runtime, batches, 1)[0] == plain(1, clip=0.02)[0]
    left = iter(batches)
    next(left)
    optimizer, losses = adam(top.parameters()), []
    steps(top, optimizer, batches, losses)
    assert len(losses) == 16
    runtime.close_loaders()
    del checked, left


def test_rows_are_clipped_once_a_step_and_not_by_hand_again():
    runtime, top = make_runtime(), make_top()
    for batch, rows in runtime.train_loader(loader(), ids=ids):
        loss_of(top, batch, rows).backward()
        every = [*top.parameters(), *rows.parameters()]
        norm = torch.stack([one.grad.norm() for one in every]).norm()
        assert torch.nn.utils.clip_grad_norm_(top.parameters(), 1e-3) == pytest.approx(norm.item())
        assert torch.stack([one.grad.norm() for one in every]).norm().item() == pytest.approx(1e-3, rel=1e-3)
        before = [one.grad.clone() for one in rows.parameters()]
        torch.nn.utils.clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1e-6)  # another model's
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        assert all(torch.equal(one, other.grad) for one, other in zip(before, rows.parameters(), strict=True))
        for one in every:
            one.grad = None
