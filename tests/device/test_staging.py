"""Staging as on an accelerator, with fake streams: every wait is requested, and results are equal."""

import contextlib
import functools
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from hostdev.cache import slots
from hostdev.device import ops, staging
from hostdev.device.ops import torch_operations
from hostdev.device.staging import Staging
from hostdev.pipeline.context import PipelineHooks
from hostdev.runtime import runtime
from tests import fields
from tests.fields import FieldsBatch
from tests.test_pipeline import adversarial, outcome, stress, trainer_of


class Streams:
    """Replaces torch.cuda, and records which stream waits for what."""

    def __init__(self):
        self.current = "compute"
        self.waits = []

    def current_stream(self, device=None):
        return _Stream(self, self.current)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def Stream(self, device):  # noqa: N802
        self.made = getattr(self, "made", 0) + 1
        return _Stream(self, ["down", "up", "results"][self.made - 1])

    def Event(self, enable_timing=False, blocking=False):  # noqa: N802
        return _Event(self)


class _Stream:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def wait_event(self, event):
        self.streams.waits.append((self.name, event.stream))

    def wait_stream(self, stream):
        self.streams.waits.append((self.name, stream.name))


class _Event:
    def __init__(self, streams):
        self.streams = streams

    def record(self, stream):
        self.stream = stream.name

    def synchronize(self):
        self.streams.waits.append(("host", self.stream))

    def elapsed_time(self, other):
        return 1.0


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return Streams()


def test_rows_cross_in_parts(streams):
    staging = Staging(torch.device("cpu"), streams=streams)
    memory = staging.pinned_buffers.take()
    host = memory.buffer(4, 2)
    host[:] = 1
    [rows], mark = staging.send([host], memory)
    patched = staging.patch(rows, np.array([2, 0], np.int32), torch.tensor([[5.0, 6.0], [7.0, 8.0]]), memory)
    assert rows.tolist() == [[7, 8], [1, 1], [5, 6], [1, 1]]
    assert streams.waits == []
    staging.await_sent([mark, patched], [rows])
    assert streams.waits == [("compute", "down")] * 2
    for receive, stream in ((staging.receive, "up"), (staging.receive_results, "results")):
        streams.waits.clear()
        [back], mark = receive([rows], memory)
        assert streams.waits == [(stream, "compute")]
        staging.await_event(mark)
        assert streams.waits[1:] == [("host", stream)]
        assert torch.equal(back, rows)


def test_rows_cross_and_come_back(device):
    staging = Staging(device, batches=2)
    for number in range(5):
        memory = staging.pinned_buffers.take()
        host = memory.buffer(400, 20)
        host[:] = number
        [rows], mark = staging.send([host], memory)
        assert rows.device.type == device.type
        late = memory.buffer(2, 20)
        late[:] = torch.tensor([[-1.0], [-2.0]])
        marks = [mark]
        if staging.copies:
            marks.append(staging.patch(rows, np.array([7, 3], np.int32), late, memory))
        else:
            rows[[7, 3]] = late
        staging.await_sent(marks, [rows])
        doubled = rows * 2
        del rows
        wanted, at = doubled * 1, np.array([9, 7], np.int32)
        picked = staging.pick([(wanted, at)], memory) if staging.copies else [wanted[at]]
        del wanted  # its memory may be used again only after the rows were picked
        [some], first = staging.receive(picked, memory)
        [small], small_mark = staging.receive_results([doubled.sum()], memory)
        [back], mark = staging.receive([doubled], memory)
        del doubled, picked
        staging.await_event(small_mark)
        assert small == 400 * 20 * 2 * number - 4 * 20 * number - 6 * 20
        staging.await_event(first)
        assert some[:, 0].tolist() == [2 * number, -2]
        staging.await_event(mark)
        expected = torch.full((400, 20), 2.0 * number)
        expected[7], expected[3] = -2, -4
        assert torch.equal(back, expected)
        memory.release()  # the next one's memory


def test_on_the_cpu_nothing_is_copied():
    staging = Staging(torch.device("cpu"))
    memory = staging.pinned_buffers.take()
    host = memory.buffer(3, 2)
    [sent], mark = staging.send([host], memory)
    staging.await_sent([mark], [sent])
    [back], mark = staging.receive([sent], memory)
    staging.await_event(mark)
    assert sent.data_ptr() == back.data_ptr() == host.data_ptr()


@pytest.mark.parametrize(
    ("mix", "depth", "cache"),
    [(True, 0, None), (True, 2, None), (False, 2, None), (True, 0, "20%"), (True, 2, "20%"), (True, 4, 1)],
)
def test_training_with_copies_gives_the_same_bits(monkeypatch, mix, depth, cache):
    batches = adversarial(0, 15)
    expected = outcome(batches, depth=0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(staging, "_to_device", lambda tensors, _: [tensor.clone() for tensor in tensors])
    options = {"cache": {"capacity_rows": cache, "window": 3}} if cache is not None else {}
    for accelerators in (False, True):  # operations
        if accelerators:
            monkeypatch.setattr(ops, "host_kernels", torch_operations)
            monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))
        monkeypatch.setattr(runtime, "Staging", functools.partial(Staging, streams=_PerThread()))
        assert outcome(batches, depth=depth, mix=mix, **options) == expected


class _PerThread(Streams):
    """The current stream is a thread's own."""

    def __init__(self):
        self._local = threading.local()
        super().__init__()

    @property
    def current(self):
        return getattr(self._local, "current", "compute")

    @current.setter
    def current(self, name):
        self._local.current = name


@pytest.fixture
def copying(monkeypatch):
    """Trainers that stage as on an accelerator, whose tensors do not share the host's memory."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(staging, "_to_device", lambda tensors, _: [tensor.clone() for tensor in tensors])
    monkeypatch.setattr(runtime, "Staging", lambda *args, **how: Staging(*args, **how, streams=_PerThread()))


@pytest.mark.parametrize("cache", [None, {"capacity_rows": "20%", "window": 3}], ids=["", "cache"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_only_the_next_batch_waits_on_the_device(copying, depth, cache):
    happened = []

    def note(stage, number):
        happened.append((stage, number))
        if stage == "step":
            time.sleep(0.01)  # a device that is slower than the host: everything else is far ahead

    for _ in trainer_of(depth=depth, cache=cache, hooks=PipelineHooks(before_stage=note)).train(adversarial(0, 12)):
        pass
    for number in range(2, 13):
        assert happened.index(("step", number - 1)) < happened.index(("send", number))
    assert any(happened.index(("lookup", number + 1)) < happened.index(("step", number)) for number in range(2, 12))


def test_random_delays_with_copies(copying):
    stress(range(5))


def test_rows_on_their_way_take_no_more_memory_with_depth(copying, monkeypatch):
    """At any depth, rows of the current and of the next batch are held; admitted rows have their optimizer state."""
    alive, most = {}, []

    def counted(make):
        def made(*arguments):
            out = make(*arguments)
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if tensor.dtype == torch.float32 and tensor.dim() > 1 and tensor.shape[-1] in (1, 16):
                    alive[id(tensor)] = tensor.nbytes
                    weakref.finalize(tensor, alive.pop, id(tensor))
            most.append(sum(alive.values()))
            return out

        return made

    monkeypatch.setattr(staging, "_to_device", counted(lambda tensors, _: [tensor.clone() for tensor in tensors]))
    for name in ("rows", "exchange"):
        monkeypatch.setattr(slots.DeviceSlots, name, counted(getattr(slots.DeviceSlots, name)))
    rng, rows = np.random.default_rng(0), 20_000
    batches = []
    for _ in range(16):
        ids = (rows * rng.random((200, 39)) ** 4).astype(np.int32)
        batches.append(FieldsBatch(np.zeros(200, np.float32), ids, np.ones((200, 39), np.float32)))
    unique = max(len(np.unique(batch.ids)) for batch in batches)
    for depth in (0, 1, 2, 4):
        made = fields.trainer_of(rows, 16, depth=depth, cache={"capacity_rows": "10%"})
        for number, _ in enumerate(made.train(batches)):
            if number == 8:
                most.clear()  # the cache is warm
        assert max(most) < (2 if depth == 0 else 2.6) * unique * 4 * 17, depth
