"""Staging as on an accelerator, with streams that do nothing: every wait is asked for, and the bits stay equal."""

import contextlib
import functools
import threading

import numpy as np
import pytest
import torch

from hostdev import trainer
from hostdev.cache import slots
from hostdev.device.staging import Staging
from tests.test_pipeline import adversarial, outcome


class Streams:
    """Stands for torch.cuda: notes which stream waits for what."""

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
        return _Stream(self, ["down", "up"][self.made - 1])

    def Event(self, enable_timing=False):  # noqa: N802
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
    host = staging.buffer(4, 2)
    host[:] = 1
    [rows], mark = staging.send([host])
    patched = staging.patch(rows, np.array([2, 0], np.int32), torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    assert rows.tolist() == [[7, 8], [1, 1], [5, 6], [1, 1]]
    assert streams.waits == []
    for each in (mark, patched):
        staging.await_sent(each, [rows])
    assert streams.waits == [("compute", "down")] * 2
    [back], mark = staging.receive([rows])
    assert streams.waits[2:] == [("up", "compute")]
    staging.await_received(mark)
    assert streams.waits[3:] == [("host", "up")]
    assert torch.equal(back, rows)


def test_on_the_cpu_nothing_is_copied():
    staging = Staging(torch.device("cpu"))
    host = staging.buffer(3, 2)
    [sent], mark = staging.send([host])
    staging.await_sent(mark, [sent])
    [back], mark = staging.receive([sent])
    staging.await_received(mark)
    assert sent.data_ptr() == back.data_ptr() == host.data_ptr()


@pytest.mark.parametrize(
    ("mix", "depth", "cache"),
    [(True, 0, None), (True, 2, None), (False, 2, None), (True, 0, "20%"), (True, 2, "20%"), (True, 4, 1)],
)
def test_training_with_copies_gives_the_same_bits(monkeypatch, mix, depth, cache):
    batches = adversarial(0, 15)
    expected = outcome(batches, depth=0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    options = {"cache": {"capacity_rows": cache, "window": 3}} if cache is not None else {}
    for accelerators in (False, True):  # operations
        if accelerators:
            monkeypatch.setattr(slots, "_on_host", lambda tensor: False)
        monkeypatch.setattr(trainer, "Staging", functools.partial(Staging, streams=_PerThread()))
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
