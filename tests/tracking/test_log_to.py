"""`Runtime.log_to` in a loop of one's own."""

import types

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import hostdev
from tests.runtime.cases import threads
from tests.tracking.cases import read_scalars

V, D, STEPS = 300, 5, 12


class Writer:
    """Keeps what it gets."""

    def __init__(self, fails_at=None):
        self.scalars, self.histograms, self.fails_at = {}, {}, fails_at

    def add_scalar(self, tag, scalar_value, global_step):
        if self.fails_at is not None and global_step >= self.fails_at:
            raise OSError("the disk is gone")
        self.scalars.setdefault(tag, []).append((global_step, scalar_value))

    def add_histogram(self, tag, values, global_step):
        self.histograms.setdefault(tag, []).append((global_step, values.copy()))


def make_table(kind, device):
    optimizer = hostdev.Adam(lr=0.1) if kind == "every row" else hostdev.LazyAdam(lr=0.1)
    if kind == "device":
        return hostdev.DeviceTable(V, D, optimizer, device, name="t", seed=1)
    if kind == "keys":
        return hostdev.HostTable(None, D, optimizer, name="t", seed=1, capacity=V, admit=hostdev.MinCount(2))
    more = {"dtype": "bfloat16", "slots": "8bit"} if kind == "bfloat16" else {}
    return hostdev.HostTable(V, D, optimizer, name="t", seed=1, **more)


def train(table, device, *logs, cache=None, loops=2, **options):
    """Train in two loops; return the table's weights."""
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    layer = torch.nn.Linear(D, 1).to(device)
    torch.nn.init.ones_(layer.weight)
    with hostdev.Runtime({"f": table}, device=device, cache=cache) as runtime:
        for writer in logs:
            runtime.log_to(writer, **options)
        for _ in range(loops):
            batches = [torch.from_numpy(rng.zipf(1.2, 40) % V).int() for _ in range(STEPS)]
            for _, rows in runtime.train(batches, ids=lambda ids: {"f": ids}):
                layer(rows["f"]).square().mean().backward()
        found = table.weights.cpu().numpy() if isinstance(table.weights, torch.Tensor) else np.array(table.weights)
    assert threads() == set()
    return found


@pytest.mark.parametrize("kind", ["host", "device", "every row", "bfloat16", "keys"])
def test_what_is_written(device, kind):
    """Figures every fourth step and histograms every sixth, over both loops; the weights are those without."""
    cache = None if kind == "device" else 50
    writer = Writer()
    wanted = train(make_table(kind, device), device, cache=cache)
    table = make_table(kind, device)
    assert np.array_equal(train(table, device, writer, cache=cache, every=4, histograms_every=6), wanted)
    steps = list(range(4, 2 * STEPS + 1, 4))
    for tag in ("speed/samples_per_second", "pipeline/step_waits_ms"):
        assert [step for step, _ in writer.scalars[tag]] == steps
    assert any(tag.startswith("ops/") for tag in writer.scalars)
    assert ("cache/t/hit_rate" in writer.scalars) == (cache is not None)
    found = writer.histograms["rows/t/norm"]
    assert [step for step, _ in found] == [6, 12, 18, 24]
    assert found[-1][1] == pytest.approx(np.linalg.norm(wanted, axis=1), rel=1e-6)


def test_the_reader_of_tensorboard(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        train(make_table("host", "cpu"), "cpu", writer, every=6)
    scalars, events = read_scalars(tmp_path)
    assert [step for step, _ in scalars["speed/samples_per_second"]] == [6, 12, 18, 24]
    assert events.Tags()["histograms"] == []  # every 60 steps


def test_a_writer_that_fails():
    """The loop goes on, with one warning; another writer gets everything."""
    writer, other = Writer(fails_at=8), Writer()
    with pytest.warns(RuntimeWarning, match="the disk is gone"):
        found = train(make_table("host", "cpu"), "cpu", writer, other, every=4)
    assert np.array_equal(found, train(make_table("host", "cpu"), "cpu"))
    assert [step for step, _ in writer.scalars["speed/samples_per_second"]] == [4]
    assert len(other.scalars["speed/samples_per_second"]) == 6


def test_what_is_refused():
    runtime = hostdev.Runtime({"f": make_table("host", "cpu")}, device="cpu")
    with pytest.raises(TypeError, match="add_histogram"):
        runtime.log_to(object())
    with pytest.raises(TypeError, match="MLflowWriter"):
        runtime.log_to(types.ModuleType("mlflow"))
    for options in ({"every": 0}, {"every": 5, "histograms_every": -1}):
        with pytest.raises(ValueError, match="at least"):
            runtime.log_to(Writer(), **options)
    runtime.close()
    with pytest.raises(ValueError, match="closed"):
        runtime.log_to(Writer())
