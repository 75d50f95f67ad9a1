"""Requests are gathered into batches, in order, within bounds; each batch is one model's."""

import asyncio
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from hostdev.core.errors import UserError
from hostdev.ext.serving.gathering import ClientGoneError, Gatherer
from hostdev.ext.serving.model import ServedModel
from hostdev.ext.serving.refused import RefusedError
from tests.serving.helpers import FILMS, as_rows, bits, repeated


class Model:
    """Predicts the doubles of its rows, and records the batches. It waits in `predict` while `gate` is closed."""

    def __init__(self, version="1"):
        self.version, self.batches = version, []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def predict(self, requests, most, is_waiting):
        wrong, bug = UserError("row 1, column 'x': wrong"), ZeroDivisionError()
        found = [wrong if "wrong" in one else bug if "bug" in one else one["x"] for one in requests]
        right = [number for number, one in enumerate(found) if not isinstance(one, Exception)]
        if not right:
            return found
        self.batches.append([len(found[number]) for number in right])
        self.entered.set()
        assert self.gate.wait(20)
        waits = any(map(is_waiting, right))
        for number in right:
            doubled = np.array(found[number], np.float32)[:, None] * 2
            found[number] = (UserError("row 1: not finite") if -2 in doubled else doubled) if waits else None
        return found


class Observer:
    def __init__(self):
        self.batches, self.rows = [], []

    def batch(self, requests, rows, seconds):
        self.batches.append((requests, rows))

    def waiting(self, rows):
        self.rows.append(rows)


@pytest.fixture
def gather():
    made, lines = [], []

    def make(model, *, most_rows=8, wait=0.0, most_waiting=20):
        observer = Observer()
        options = {"most_rows": most_rows, "wait": wait, "most_waiting": most_waiting}
        made.append(Gatherer(model, **options, metrics=observer, note=lines.append))
        made[-1].observer, made[-1].lines = observer, lines
        return made[-1]

    yield make
    assert all(one.close(20) for one in made)


def never():
    return asyncio.get_running_loop().create_future()


def ask(gatherer, values, *, version=None, gone=never, **more):
    return asyncio.ensure_future(gatherer.predict({"x": values, **more}, len(values), version, gone))


async def blocked(gatherer, model):
    """Return a request that is being computed until the gate opens."""
    model.gate.clear()
    first = ask(gatherer, [1])
    await asyncio.to_thread(model.entered.wait, 20)
    return first


def test_requests_that_wait_are_one_batch(gather):
    model = Model()
    gatherer = gather(model)

    async def run():
        first = await blocked(gatherer, model)
        others = [ask(gatherer, [number, number]) for number in range(2, 8)]
        await asyncio.sleep(0)
        model.gate.set()
        return [answer.values[:, 0].tolist() for answer in await asyncio.gather(first, *others)]

    assert asyncio.run(run()) == [[2], *([2 * number] * 2 for number in range(2, 8))]
    assert model.batches == [[1], [2] * 4, [2] * 2]
    assert gatherer.observer.batches[:2] == [(1, 1), (4, 8)]
    assert max(gatherer.observer.rows) == 12
    assert gatherer.observer.rows[-1] == 0


def test_a_large_request_is_a_batch_of_its_own(gather):
    model = Model()
    gatherer = gather(model, most_waiting=100)

    async def run():
        first = await blocked(gatherer, model)
        others = [ask(gatherer, [1] * n) for n in (2, 30, 3)]
        await asyncio.sleep(0)
        model.gate.set()
        await asyncio.gather(first, *others)

    asyncio.run(run())
    assert model.batches == [[1], [2], [30], [3]]


def test_a_bounded_wait(gather):
    """A request waits for others, until the batch is full or the time has passed."""
    model = Model()
    gatherer = gather(model, wait=0.3)

    async def run():
        start = time.monotonic()
        await asyncio.gather(ask(gatherer, [1]), ask(gatherer, [2]))
        first = time.monotonic() - start
        await asyncio.gather(*(ask(gatherer, [1]) for _ in range(8)))
        return first

    assert asyncio.run(run()) >= 0.29
    assert model.batches == [[1, 1], [1] * 8]


def test_a_bounded_queue(gather):
    model = Model()
    gatherer = gather(model, most_waiting=5)

    async def run():
        first = await blocked(gatherer, model)
        kept = ask(gatherer, [1] * 9)  # an empty queue takes any request
        await asyncio.sleep(0)
        with pytest.raises(RefusedError) as refused:
            await ask(gatherer, [1])
        model.gate.set()
        await asyncio.gather(first, kept)
        return refused.value

    refused = asyncio.run(run())
    assert (refused.status, refused.headers) == (503, {"Retry-After": "1"})
    assert model.batches == [[1], [9]]


def test_a_client_that_goes(gather):
    """Its rows are not computed, unless that has begun."""
    model = Model()
    gatherer = gather(model)

    async def run():
        first = await blocked(gatherer, model)
        gone = asyncio.get_running_loop().create_future()
        second, third = ask(gatherer, [7, 7], gone=lambda: gone), ask(gatherer, [3])
        await asyncio.sleep(0)
        gone.set_result(None)
        with pytest.raises(ClientGoneError):
            await second
        model.gate.set()
        await asyncio.gather(first, third)

    asyncio.run(run())
    assert model.batches == [[1], [1]]


def test_a_wrong_request_fails_alone(gather):
    model = Model()
    gatherer = gather(model)

    async def run():
        first = await blocked(gatherer, model)
        some = [ask(gatherer, [2]), ask(gatherer, [3], wrong=1), ask(gatherer, [-1]), ask(gatherer, [4], bug=1)]
        some += [ask(gatherer, [5], version="2"), ask(gatherer, [6], version="1")]
        await asyncio.sleep(0)
        model.gate.set()
        await first
        return await asyncio.gather(*some, return_exceptions=True)

    right, wrong, infinite, bug, other, last = asyncio.run(run())
    assert (right.values.tolist(), last.values.tolist()) == ([[4]], [[12]])
    assert [(one.status, str(one)[:14]) for one in (wrong, infinite, bug, other)] == [
        (400, "row 1, column "),
        (400, "row 1: not fin"),
        (500, "the server has"),
        (404, "there is no ve"),
    ]
    assert len(gatherer.lines) == 1 and "ZeroDivisionError" in gatherer.lines[0]


def test_a_batch_has_one_model(gather):
    """Another model takes effect with the next batch; a batch that has begun ends with its own."""
    old, new = Model("1"), Model("2")
    gatherer = gather(old)

    async def run():
        first = await blocked(gatherer, old)
        others = [ask(gatherer, [2]), ask(gatherer, [3])]
        await asyncio.sleep(0)
        gatherer.model = new
        old.gate.set()
        return [answer.model.version for answer in await asyncio.gather(first, *others)]

    assert asyncio.run(run()) == ["1", "2", "2"]
    assert (old.batches, new.batches) == ([[1]], [[1, 1]])


def test_the_end(gather):
    """What was accepted is computed; new requests are refused."""
    model = Model()
    gatherer = gather(model, wait=10)

    async def run():
        first, second = ask(gatherer, [1]), ask(gatherer, [2])
        await asyncio.sleep(0)
        assert await asyncio.to_thread(gatherer.close, 20)
        with pytest.raises(RefusedError, match="is ending"):
            await ask(gatherer, [3])
        return [answer.values.tolist() for answer in await asyncio.gather(first, second)]

    assert asyncio.run(run()) == [[[2]], [[4]]]


@pytest.mark.parametrize("sizes", [(1, 1), (3, 70, 1, 20), (200, 5), (1,) * 40])
def test_gathered_rows(film_server, sizes):
    """A batch's predictions are those of `Predictor` for all its rows together, to the bit.

    They differ from those of each request alone by rounding only.
    """
    predictor, lines = film_server.predictor, []
    model = ServedModel(predictor, lines.append)
    whole = repeated(FILMS, sum(sizes))
    expected = predictor(whole)
    edges = np.cumsum((0, *sizes))
    requests = [{name: values[start:stop] for name, values in whole.items()} for start, stop in pairwise(edges)]
    found = model.predict(requests, 1 << 20)
    assert [bits(each[:, 0]) for each in found] == [bits(expected[start:stop]) for start, stop in pairwise(edges)]
    for request, each in zip(requests, found, strict=True):
        np.testing.assert_array_max_ulp(predictor(request), each[:, 0], 16)
    assert lines == []


def test_many_clients_at_once(film_server):
    """Each gets its own rows' predictions, whatever the batches are."""
    predictor = film_server.predictor
    rows = as_rows(repeated(FILMS, 24))
    expected = [predictor(row)[0] for row in rows]

    def client(number, found):
        for row, right in list(zip(rows, expected, strict=True))[number:]:
            answer = film_server.raw_json({"rows": [row]})
            found.append(abs(answer["predictions"][0] - right) < 1e-6)

    found = []
    threads = [threading.Thread(target=client, args=(number, found)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == sum(range(17, 25)) and all(found)
