"""What ends loops but their last batch: `Runtime.close`, another loop after a body has raised, the end of a loader."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hostdev import Runtime
from tests.runtime.cases import BodyError, Case, batches_of, differing, features_of, ids, threads, wanted_of

modes = pytest.mark.parametrize(("depth", "cache"), [(0, None), (2, None), (3, "20%")])


@modes
def test_a_runtime_that_is_closed(device, depth, cache):
    """Its loops end, with what has been stepped; again it does nothing; its tables are there for another one."""
    batches = batches_of(6)
    case = Case(device, options={"depth": depth, "cache": cache})
    runtime = case.runtime
    loop = case.loop(batches)
    for label, rows in loop:
        case.step(label, rows)
        if rows.step == 2:
            break
    predicting = runtime.predict(batches, ids=ids)
    next(predicting)
    runtime.close()
    runtime.close()
    assert threads() == set()
    assert list(loop.close() or [None]) == [None]
    assert case.tables["users"].step == 2
    for call in (
        lambda: runtime.train(batches),
        lambda: runtime.predict(batches),
        lambda: runtime.lookup({}),
        lambda: runtime.write_back(),
        lambda: runtime.save("nowhere"),
        lambda: runtime.load("nowhere"),
        lambda: runtime.freeze(),
        lambda: runtime.unfreeze("users"),
        lambda: runtime.optimizer,
        runtime.__enter__,
    ):
        with pytest.raises(ValueError, match="this runtime is closed; create a new Runtime with the same tables"):
            call()
    with Runtime(features_of(case.tables), device=device, depth=depth, cache=cache) as case.runtime:
        case.train(batches[2:])
        adam = case.state()
    with pytest.raises(ValueError, match="this runtime is closed"):
        case.train(batches)
    assert differing(adam, wanted_of(device, batches)) == []
    with contextlib.suppress(BodyError), Runtime(features_of(case.tables), device=device) as other:
        raise BodyError
    with pytest.raises(ValueError, match="this runtime is closed"):
        other.lookup({})


def test_a_closed_runtime_holds_no_table():
    case = Case(options={"cache": "20%"}).train(batches_of(2))
    case.runtime.optimizer.zero_grad()
    held = [weakref.ref(table) for table in case.tables.values()]
    case.runtime.close()
    runtime = case.runtime
    del case
    gc.collect()
    assert [one() for one in held] == [None] * 4
    assert runtime.tables == {}
    assert runtime.caches == []


@modes
@pytest.mark.parametrize("kind", ["train", "predict"])
def test_a_body_that_raises_does_not_block_the_next_loop(device, depth, cache, kind):
    """However its loop is held, as by a traceback in a notebook: the cell may be run again, and again."""
    batches = batches_of(5)
    case = Case(device, options={"depth": depth, "cache": cache})
    held, other = [], Runtime(features_of(case.tables), device=device)
    for _ in range(3):
        with pytest.raises(BodyError):
            loop = case.loop(batches) if kind == "train" else case.runtime.predict(batches, ids=ids)
            held.append(loop)
            for _, rows in loop:
                if rows.step == 2:
                    raise BodyError
    if kind == "train":  # a loop of another runtime over the tables, too
        next(other.train(batches, ids=ids))
        with pytest.raises(BodyError):
            for _ in held[-1:]:
                for _ in case.loop(batches):
                    raise BodyError
    case.train(batches)
    for loop in held:
        with pytest.raises(ValueError, match="this loop ended when another one began"):
            next(loop)
    assert threads() == set()
    assert differing(case.state(), wanted_of(device, batches)) == []


def test_a_body_that_has_raised_can_be_gone_on_with(device):
    """Nobody has begun another loop, so the loop is still there, as where a batch runs out of memory and is skipped."""
    batches = batches_of(6)
    case = Case(device)
    loop = case.loop(batches)
    while True:
        try:
            for label, rows in loop:
                if rows.step == 3:
                    raise BodyError
                case.step(label, rows)
            break
        except BodyError:
            case.runtime.lookup(ids(batches[0]))
    wanted = Case(device).train(batch for number, batch in enumerate(batches) if number != 2)
    assert differing(case.state(), wanted.state()) == []


@modes
def test_a_prediction_ends_with_its_last_batch(device, depth, cache):
    """Where the loader has a length: nobody needs to ask for more, and what is asked gives nothing."""
    batches = batches_of(4)
    case = Case(device, options={"depth": depth, "cache": cache})
    for label, rows in case.loop(batches):
        case.step(label, rows)
        loop = case.runtime.predict(batches[:2], ids=ids)
        for _, (_, found) in zip(range(2), loop, strict=False):
            shape = found["user"].shape
        assert shape == (12, 4)
        assert case.runtime.loops.predicting == 0
        again = case.runtime.predict(batches[:1], ids=ids)
        _, found = next(again)
        assert case.runtime.loops.predicting == 0
        assert found["user"].shape == (12, 4)  # as long as the batch is held
        assert found.to_host([torch.ones(1, device=device)], lambda arrays: float(arrays[0][0])).get() == 1.0
    assert next(again, None) is None
    case.train(batches)
    with pytest.raises(ValueError, match="this batch is over"):
        found["user"]
    last = case.runtime.predict(batches[:1], ids=ids)
    next(last)
    case.train(batches)
    assert next(last, None) is None
    assert threads() == set()


def test_a_loader_whose_length_is_wrong(device):
    """Too short a length loses no batch, and a loader that fails at its end is heard."""

    class Wrong:
        own_generators = False

        def __init__(self, length, error=None):
            self.length, self.error = length, error

        def __len__(self):
            return self.length

        def __iter__(self):
            yield from batches_of(4)
            if self.error is not None:
                raise self.error

    for depth in (0, 2):
        case = Case(device, options={"depth": depth})
        for length in (1, 2, 4, 5):
            assert sum(1 for _ in case.runtime.predict(Wrong(length), ids=ids)) == 4
        seen = 0
        with pytest.raises(OSError, match="at its end"):
            for _ in case.runtime.predict(Wrong(4, OSError("at its end")), ids=ids):
                seen += 1
        assert seen == 4
        assert case.runtime.loops.predicting == 0

    class Stream(IterableDataset):
        own_generators = False

        def __len__(self):
            raise NotImplementedError

        def __iter__(self):
            return iter(batches_of(3))

    assert sum(1 for _ in case.runtime.predict(DataLoader(Stream(), batch_size=None), ids=ids)) == 3


def test_the_length_of_loops():
    case, batches = Case(), batches_of(6)
    for made, length in [
        (lambda: case.loop(batches), 6),
        (lambda: case.loop(batches, accumulate=4), 6),
        (lambda: case.loop(batches, micro_batches=2), 6),
        (lambda: case.runtime.predict(batches, ids=ids), 6),
        (lambda: case.runtime.predict(batches, ids=ids, micro_batches=2), 3),  # steps, which are what it gives
    ]:
        loop = made()
        assert (len(loop), len(iter(loop))) == (length, length)
        loop = made()
        next(loop)
        loop.close()
        assert len(loop) == length  # asked for the first time when it is over
    for given in (iter(batches), (batch for batch in batches)):
        with pytest.raises(TypeError, match="has no len"):
            len(case.loop(given))


def test_where_a_checkpoint_is(tmp_path):
    case = Case().train(batches_of(2))
    saving = case.runtime.save(tmp_path / "saved", wait=False)
    assert saving.wait().path == saving.path
    assert saving.path.parent == tmp_path / "saved"
    assert saving.path.is_dir()
    assert Case().runtime.load(case.runtime.save(tmp_path / "saved").path) is None


def test_a_loop_by_steps_that_is_left_between_them():
    """It is gone on with: of four batches in two steps one step has been given out."""
    case, batches = Case(), batches_of(4)
    loop, sizes = case.runtime.predict(batches, ids=ids, micro_batches=2), []
    assert len(loop) == 2
    for step in loop:
        sizes.append([len(step.micro_batch(number)[1]["user"]) for number in range(2)])
        break
    for step in loop:
        sizes.append([len(step.micro_batch(number)[1]["user"]) for number in range(2)])
    assert sizes == [[12, 12], [12, 12]]
