"""torch's idle threads leave the cores to the host's kernels, in a program that imported torch first."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
import threading
import torch
torch.set_num_threads({threads})
import hostdev

def teams():
    return [thread.daemon for thread in threading.enumerate() if thread.name == "hostdev-openmp"]

table = hostdev.HostTable(9, 2, hostdev.SGD(lr=1.0), name="t")
assert not teams()
for _ in range(2):
    hostdev.Runtime({{"f": table}}, device="cpu", depth=0)
assert teams() == [True] * {expected}, teams()
assert torch.get_num_threads() == {threads}
assert torch.ones(1 << 20).add_(1).sum() == 2 << 20
"""


@pytest.mark.parametrize(
    ("threads", "setting", "expected"), [(2, {}, 1), (1, {}, 0), (2, {"OMP_WAIT_POLICY": "active"}, 0)]
)
def test_idle_threads_of_torch_spin_briefly(threads, setting, expected):
    """One team for all runtimes, and none where torch has no other thread or the user has decided how they wait."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    code = PROGRAM.format(threads=threads, expected=expected)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment | setting, check=True)
