"""hostdev's training step on the CPU, and its dense part alone: the same network on an input that is there."""

import sys

from serve import serve  # isort: skip  (finds workload.py)
import hostdev.core.environment  # isort: skip  (before torch)
import numpy as np
import torch
from hostdev.data.batch import WideBatch as Batch
from hostdev.models.wide_deep import wide_loss
from workload import DIM, batch_of

import hostdev
from hostdev.core.primitive import OpLog
from hostdev.device.backend import make_deterministic
from hostdev.train.trainer import Trainer

rows = int(sys.argv[1])
cpu = torch.device("cpu")
make_deterministic(cpu)


def make(size, precision):
    ids, label = batch_of(rows, size)
    batch = Batch(label, ids, np.ones(ids.shape, np.float32))
    trainer = Trainer(rows, DIM, host_device_mix=True, device=cpu, l2="none", precision=precision, seed=1, log=OpLog())
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    deep = torch.randn(size, 39 * DIM).to(dtype).requires_grad_()
    linear, y = torch.randn(size, requires_grad=True), torch.from_numpy(label)

    def dense():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = trainer.network(linear, deep)
        loss = wide_loss(logits, y)
        trainer.adam.zero_grad()
        deep.grad = linear.grad = None
        loss.backward()
        trainer.adam.step()
        return loss.item()

    return {f"step {precision} {size}": lambda: list(trainer.train([batch])), f"dense {precision} {size}": dense}


ops = {}
for precision in ("fp32", "bf16"):
    for size in (4000, 16000):
        ops |= make(size, precision)
serve(ops, {"hostdev": hostdev.__version__, "torch": torch.__version__})
