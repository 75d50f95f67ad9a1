"""hostdev's training step on the CPU, and its dense part alone: the same network on a given input."""

import sys

from serve import serve  # isort: skip  (finds workload.py and wide_deep.py)
import hostdev.core.environment  # isort: skip  (before torch)
import numpy as np
import torch
from wide_deep import FieldsBatch, make_trainer
from workload import DIM, draw_batch

import hostdev
from hostdev.device.backend import make_deterministic
from hostdev.models.wide_deep.network import wide_loss

rows = int(sys.argv[1])
cpu = torch.device("cpu")
make_deterministic(cpu)


def make(size, precision):
    ids, label = draw_batch(rows, size)
    batch = FieldsBatch(label, ids, np.ones(ids.shape, np.float32))
    trainer = make_trainer(rows, DIM, device=cpu, precision=precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    wide = torch.randn(*ids.shape, 1).requires_grad_()
    deep = torch.randn(*ids.shape, DIM).to(dtype).requires_grad_()
    dense, y = torch.from_numpy(batch.dense), torch.from_numpy(label)

    def dense_part():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = trainer.model(dense, {"fields": (wide, deep)})
        loss = wide_loss(logits, y)
        trainer.adam.zero_grad()
        deep.grad = wide.grad = None
        loss.backward()
        trainer.adam.step()
        return loss.item()

    return {f"step {precision} {size}": lambda: list(trainer.train([batch])), f"dense {precision} {size}": dense_part}


ops = {}
for precision in ("fp32", "bf16"):
    for size in (4000, 16000):
        ops |= make(size, precision)
serve(ops, {"hostdev": hostdev.__version__, "torch": torch.__version__})
