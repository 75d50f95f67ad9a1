"""What a run of `hostdev.train` does not import, and that torch is afterwards as it was."""

import subprocess
import sys

import torch
from torch.optim import Optimizer

from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.train import network
from tests.conftest import environment

CODE = """
import sys
from hostdev.ext.training import cli as train
from hostdev.core import cli

code = cli.run(train.PROG, train.main, sys.argv[1:])
assert code == 0, code
print(*sorted({"torch._dynamo", "torch._inductor", "pandas"} & set(sys.modules)), sep="\\n", file=sys.stderr)
"""


def test_a_run_imports_neither_torchs_compiler_nor_pandas(tmp_path):
    build(Synthetic(600, 0), tmp_path / "data", Options(threshold=2))
    options = ["--data", tmp_path / "data", "--batch-size", 100, "--emb-dim", 4, "--max-steps", 2, "--device", "cpu"]
    options += ["--host-device-mix", "--run-dir", tmp_path / "run"]
    command = [sys.executable, "-c", CODE, *map(str, options)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def marks():
    return [hasattr(getattr(Optimizer, name).__wrapped__, network._MARK) for name in network._METHODS]


def test_torch_is_as_it_was():
    before = marks()
    with network.without_compiler():
        assert all(marks()) or "torch._dynamo" in sys.modules
    assert marks() == before


def test_the_steps_are_torchs():
    torch.manual_seed(0)
    found = []
    for kind in (torch.optim.Adam, network.DenseAdam):
        values = torch.nn.Parameter(torch.linspace(-1, 1, 50))
        adam = kind([values], lr=0.1, fused=True)
        counted = []
        adam.register_step_post_hook(lambda *_, counted=counted: counted.append(1))
        for step in range(5):
            (values.square() * step).sum().backward()
            adam.step()
            adam.zero_grad()
        found.append((values.detach().clone(), len(counted), adam.state_dict()["state"][0]["exp_avg"].clone()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
