"""Selection of the device, on simulated machines."""

import json
import types
from pathlib import Path

import pytest
import torch

from hostdev import UserError
from hostdev.commands import train
from hostdev.device import backend
from hostdev.ext.verify import cli as verify


class Machine:
    """A machine with `count` accelerators of a kind, and the named functions of torch."""

    def __init__(self, kind, count, names=("Stream", "Event", "stream", "current_stream"), current=0):
        self.kind, self.count, self.current = kind, count, current
        self.asked = []
        self.module = types.SimpleNamespace(**dict.fromkeys(names, lambda *args: None))
        self.module.mem_get_info = lambda device: (self.asked.append(device), (5, 9))[1]
        self.module.get_device_name = lambda device: f"Product {device.index}"

    def patch(self, patcher):
        accelerator = torch.accelerator
        patcher.setattr(accelerator, "is_available", lambda: True)
        patcher.setattr(accelerator, "current_accelerator", lambda: torch.device(self.kind))
        patcher.setattr(accelerator, "device_count", lambda: self.count)
        patcher.setattr(accelerator, "current_device_index", lambda: self.current)
        patcher.setattr(accelerator, "set_device_index", lambda index: setattr(self, "current", index))
        patcher.setattr(torch, "get_device_module", lambda device: self.module)
        return self


@pytest.mark.parametrize(("name", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0), ("cuda:2", 2)])
def test_an_accelerator_has_an_index(monkeypatch, name, index):
    """The current device is used unless another is named, and it answers every query."""
    machine = Machine("cuda", 3, current=1).patch(monkeypatch)
    device = backend.select(name)
    assert device == torch.device("cuda", index)
    assert machine.current == index
    assert backend.free_bytes(device) == 5
    assert machine.asked == [device]
    assert backend.describe(device) == f"cuda:{index} (Product {index})"
    with pytest.raises(UserError, match="--device cuda:3: this machine has only 3 of these devices, numbered from 0"):
        backend.select("cuda:3")


def test_processes_of_a_host_take_turns(monkeypatch):
    """Processes get devices in turn, and share them if there are fewer."""
    Machine("cuda", 2).patch(monkeypatch)
    for number, index in enumerate([0, 1, 0]):
        backend.assign_device(number)
        assert backend.select("auto") == backend.select("cuda") == torch.device("cuda", index)
    assert backend.select("cuda:1") == torch.device("cuda", 1)
    backend.assign_device(0)


def test_a_device_without_streams_is_refused(monkeypatch):
    Machine("mps", 1, names=("Event",)).patch(monkeypatch)
    with pytest.raises(UserError, match="--device mps: torch has no streams on this device, .*"):
        backend.select("mps")
    assert backend.select("auto") == torch.device("cpu")


@pytest.fixture
def precision():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


def test_tf32_is_on_or_ieee(monkeypatch, precision):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    device = torch.device("cuda", 0)
    for on, expected in ((True, "tf32"), (False, "ieee")):
        backend.set_tf32(device, on)
        assert precision.fp32_precision == expected


def test_tf32_that_is_not_there(monkeypatch, precision):
    before = precision.fp32_precision
    with pytest.raises(UserError, match="--tf32 has no effect on cpu; leave out --tf32"):
        backend.set_tf32(torch.device("cpu"), True)
    backend.set_tf32(torch.device("cpu"), False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    with pytest.raises(
        UserError, match=r"--tf32 has no effect on cuda:0 \(T4\), whose compute capability is 7.5, below"
    ):
        backend.set_tf32(torch.device("cuda", 0), True)
    assert precision.fp32_precision == before


@pytest.mark.slow
@pytest.mark.parametrize("on", [False, True])
def test_the_commands_set_tf32(monkeypatch, small_data, in_process, on):
    asked = []
    monkeypatch.setattr(backend, "set_tf32", lambda device, on: asked.append((device.type, on)))
    options = ["--data", small_data, "--device", "cpu", "--batch-size", 200, "--emb-dim", 4, *["--tf32"][:on]]
    code, out, _ = in_process(train, *options, "--max-steps", 1, "--epochs", 1, "--host-device-mix", "--run-dir", "run")
    assert code == 0
    assert ("fp32 with TF32 on cpu" in out) == on
    assert json.loads(Path("run/config.json").read_text())["tf32"] == on
    code, out, _ = in_process(verify, *options, "--steps", 2, "--host-threads", 1)
    assert code == 0
    assert ("fp32 with TF32 on cpu" in out) == on
    assert asked == [("cpu", on)] * 2
