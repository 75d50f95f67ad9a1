"""After the warm-up no step of a training waits for a kernel to be compiled, or loaded from numba's cache."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import importlib, pkgutil, sys
import numpy as np, torch
import hostdev.kernels
from hostdev.data.batch import WideBatch as Batch
from hostdev.cache import planner, planning
from hostdev.host.warm_up import warm_up
from hostdev.kernels.pool import set_host_threads
from hostdev.core.primitive import OpLog
from hostdev.train.trainer import Trainer

names = [name for _, name, _ in pkgutil.iter_modules(hostdev.kernels.__path__, "hostdev.kernels.")]
modules = [planning, *map(importlib.import_module, names)]

def compiled():
    return {(kernel.__name__, signature) for module in modules for kernel in vars(module).values()
            for signature in getattr(kernel, "signatures", ())
            if kernel.targetoptions.get("inline", "never") == "never"}

dtype, depth, cache = np.dtype(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None
set_host_threads(2)
warm_up(dtype)
if cache:
    planner.warm_up(dtype)
    warm_up(np.dtype(np.int32))
before, rng = compiled(), np.random.default_rng(0)
assert before
trainer = Trainer(300_000, 8, host_device_mix=True, device=torch.device("cpu"), l2="none", seed=1, log=OpLog(),
                  depth=depth, cache={"capacity_rows": cache, "window": 2} if cache else None)
batches = [Batch(np.zeros(2000, np.float32), (300_000 * rng.random((2000, 39)) ** 3).astype(dtype),
                 np.ones((2000, 39), np.float32)) for _ in range(6)]
for _ in trainer.train(batches):
    pass
print(*sorted(map(str, compiled() - before)), sep="\\n")
"""


@pytest.mark.parametrize(
    ("dtype", "depth", "cache"), [("int32", 0, ""), ("int64", 2, ""), ("int32", 2, "5%"), ("int64", 0, "5%")]
)
def test_nothing_is_compiled_in_training(dtype, depth, cache):
    command = [sys.executable, "-c", CODE, dtype, str(depth), cache]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout.strip()
