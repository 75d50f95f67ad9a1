"""Loaders that write again to memory that they gave: seen where the loop reads ahead, right where it does not."""

import dataclasses
import itertools
import sys

import numpy as np
import pytest
import torch

import hostdev
from hostdev.runtime import reading
from tests import forks
from tests.conftest import environment

ROWS, STEPS = 100, 25
IDS = np.arange(ROWS).reshape(STEPS, -1)


@dataclasses.dataclass
class Batch:
    id: torch.Tensor
    scale: torch.Tensor


class Slots:
    __slots__ = ("id", "scale")

    def __init__(self, id, scale):
        self.id, self.scale = id, scale


def refilled_by_torch(make):
    """One tensor for all batches, as a loader with a pinned buffer has it."""
    ids, scale = torch.empty(IDS.shape[1], dtype=torch.int64), torch.empty(IDS.shape[1])
    for number, row in enumerate(IDS):
        ids.copy_(torch.from_numpy(row))
        scale.fill_(number + 1)
        yield make(ids, scale)


def refilled_by_numpy(make):
    ids, scale = np.empty(IDS.shape[1], np.int64), np.empty(IDS.shape[1], np.float32)
    for number, row in enumerate(IDS):
        ids[:], scale[:] = row, number + 1
        yield make(ids, torch.from_numpy(scale))


def two_buffers(make):
    buffers = [np.empty(IDS.shape[1], np.float32) for _ in range(2)]
    for number, row in enumerate(IDS):
        buffers[number % 2][:] = number + 1
        yield make(row, buffers[number % 2])


def shuffled_in_place(make):
    """Views of one tensor, whose rows the loader moves while some are in flight."""
    scale = torch.arange(1.0, STEPS + 1)[:, None].repeat(1, IDS.shape[1])
    for number, row in enumerate(IDS):
        if number == 13:
            scale[10:] = scale[10:].flip(0)
        yield make(row, scale[number])


LOADERS = [refilled_by_torch, refilled_by_numpy, two_buffers, shuffled_in_place]
KINDS = {
    "dict": lambda ids, scale: {"id": ids, "scale": scale},
    "nested": lambda ids, scale: [{"id": ids, "other": (1, {"scale": scale})}],
    "dataclass": Batch,
    "slots": Slots,
}


def parts(batch):
    if isinstance(batch, dict):
        return batch["id"], batch["scale"]
    return (batch[0]["id"], batch[0]["other"][1]["scale"]) if isinstance(batch, list) else (batch.id, batch.scale)


def train(loader, depth, cache=None, send=None, accumulate=1, **options):
    table = hostdev.HostTable(ROWS, 1, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0))
    runtime = hostdev.Runtime({"id": table}, device="cpu", depth=depth, cache=cache)
    options = {"read_ahead": True, **options}
    loop = runtime.train(loader, ids=lambda b: {"id": parts(b)[0]}, send=send, accumulate=accumulate, **options)
    for batch, rows in loop:
        scale = torch.as_tensor(batch if send else parts(batch)[1])
        (rows["id"].squeeze(1) * scale).sum().backward()
    runtime.write_back()
    return -np.array(table.weights)[:, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", LOADERS)
def test_what_is_right_without_reading_ahead_is_refused_with_it(loader, kind):
    scale = np.repeat(np.arange(1.0, STEPS + 1), IDS.shape[1])
    wanted = scale if loader is not shuffled_in_place else train(loader(KINDS[kind]), 0)
    for options in ({"depth": 0}, {"depth": 2, "read_ahead": 0}, {"depth": 2, "cache": "20%", "read_ahead": 0}):
        np.testing.assert_array_equal(train(loader(KINDS[kind]), **options), wanted)
    for options in ({"depth": 2}, {"depth": 4, "cache": "20%"}, {"depth": 0, "accumulate": 3}):
        if loader is shuffled_in_place and options["depth"] == 0:
            continue  # no group of three has rows from before and after
        with pytest.raises(ValueError, match=r"^reading batch \d+ has changed an earlier batch"):
            train(loader(KINDS[kind]), **options)


@pytest.mark.parametrize("options", [{"depth": 2}, {"depth": 0, "cache": "20%"}, {"depth": 0, "accumulate": 3}])
def test_a_batch_that_was_changed_is_not_given_out(options):
    """The error comes in its place, and not in that of the batch that was read over it: the loop may be left there."""
    given, options = [], dict(options)
    together = {"accumulate": options.pop("accumulate", 1), "read_ahead": True}
    table = hostdev.HostTable(ROWS, 1, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0))
    runtime = hostdev.Runtime({"id": table}, device="cpu", **options)
    with pytest.raises(ValueError, match="has changed an earlier batch"):
        for batch, rows in runtime.train(refilled_by_numpy(KINDS["dict"]), ids=lambda b: {"id": b["id"]}, **together):
            given.append((rows.step, batch["scale"].tolist()))
    assert given == [(number, [float(number)] * 4) for number, _ in given]


@pytest.mark.parametrize("depth", [0, 2])
def test_what_send_returns(depth):
    """Its memory is looked at in place of the batch's; a copy that it makes is right."""
    wanted = np.repeat(np.arange(1.0, STEPS + 1), IDS.shape[1])
    made = train(refilled_by_numpy(KINDS["dict"]), depth, send=lambda b: b["scale"].clone())
    np.testing.assert_array_equal(made, wanted)
    if depth:
        with pytest.raises(ValueError, match="has changed an earlier batch"):
            train(refilled_by_numpy(KINDS["dict"]), depth, send=lambda b: b["scale"])


def test_memory_that_batches_share_and_nobody_changes():
    """One batch again and again, a tensor that all have, columns of one array; and what the body itself changes."""
    one = {"id": np.arange(4), "scale": torch.ones(4)}
    assert train(itertools.repeat(one, 9), 2)[:4].tolist() == [9.0] * 4
    table = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    columns = [{"id": np.arange(4), "scale": torch.from_numpy(table)[:, at % 2]} for at in range(6)]
    assert train(columns, 2).tolist()[:4] == [3.0, 15.0, 27.0, 39.0]
    everywhere = torch.zeros(4)
    batches = [{"id": np.arange(4), "scale": everywhere} for _ in range(5)]
    t = hostdev.HostTable(ROWS, 1, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0))
    for batch, rows in hostdev.Runtime({"id": t}, device="cpu", depth=2).train(batches, ids=lambda b: {"id": b["id"]}):
        (rows["id"].squeeze(1) * batch["scale"]).sum().backward()
        batch["scale"] += 1
    assert t.lookup(np.arange(4)).ravel().tolist() == [-10.0] * 4


REFILLED = """
import numpy as np, hostdev
ids = np.zeros(4096, np.int64)
def loader():
    for number in range(200):
        ids[:] = -1
        ids[:] = np.arange(4096) * 7 % 5000
        yield {"id": ids}
        ids[:] = -1
table = hostdev.HostTable(5000, 8, hostdev.LazyAdam(), name="t")
runtime = hostdev.Runtime({"id": table}, device="cpu", depth=3)
for batch, rows in runtime.train(loader(), ids=lambda batch: batch, send=lambda batch: (), read_ahead=True):
    rows["id"].sum().backward()
print(table.step)
"""


def test_ids_are_the_runtimes_own_once_they_are_checked(tmp_path):
    """Refilled through -1 while batches are in flight: every batch has the ids that were checked."""
    found = forks.run(
        [sys.executable, "-c", REFILLED],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "200\n", "")


def test_how_far_a_loop_reads_ahead():
    """`depth` steps, and with a cache that looks ahead its window besides; at most `read_ahead` batches."""
    cases = [
        ({"depth": 0}, {}, 0),
        ({"depth": 2}, {}, 2),
        ({"depth": 4}, {}, 4),
        ({"depth": 2}, {"accumulate": 4}, 8 + 3),
        ({"depth": 2, "cache": "20%"}, {}, 18),
        ({"depth": 0, "cache": "20%"}, {}, 16),
        ({"depth": 2, "cache": hostdev.CacheSpec("20%", "lookahead", 5)}, {}, 7),
        ({"depth": 2}, {"read_ahead": 1}, 1),
        ({"depth": 2}, {"read_ahead": 0}, 0),
        ({"depth": 2}, {"read_ahead": 9}, 2),
        ({"depth": 2, "cache": "20%"}, {"read_ahead": 6}, 6),
        ({"depth": 2}, {"accumulate": 4, "read_ahead": 5}, 4 + 3),
    ]
    for options, how, most in cases:
        table = hostdev.HostTable(ROWS, 4, hostdev.SGD(lr=0.1), name="t")
        runtime, read, seen = hostdev.Runtime({"id": table}, device="cpu", **options), [], []

        def batches(read=read):
            for number in range(80):
                read.append(number)
                yield {"id": IDS[number % STEPS]}

        for given, (_, rows) in enumerate(runtime.train(batches(), **{"read_ahead": True, **how}), 1):
            seen.append(len(read) - given)
            rows["id"].sum().backward()
        assert max(seen) == most, (options, how)
        assert len(read) == 80
    runtime = hostdev.Runtime({"id": table}, device="cpu")
    for wrong in (-1, 1.5, False, "2"):
        with pytest.raises(ValueError, match="read_ahead .* number of batches, 0 or more, not"):
            runtime.train([], read_ahead=wrong)
    with pytest.raises(ValueError, match="read_ahead has no effect with background=True"):
        runtime.train([], read_ahead=1, background=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_tensors_of_any_dtype_are_looked_at(dtype):
    """Refilled through memory that torch does not see, in two dimensions and in none."""
    for shape in ((3, 4), ()):
        held = torch.zeros(shape).to(dtype)
        before = reading._content(held)
        raw = held.view(-1).view(torch.uint8).numpy()
        raw[0] = 1
        assert reading._content(held) != before
