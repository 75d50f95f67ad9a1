"""Made the files beside this one, with hostdev 0.1.0. They stay as they are: later versions must read them."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from hostdev import HostTable, LazyAdam, RowWiseAdagrad, Runtime


def main(path):
    tables = {
        "a": HostTable(70, 3, LazyAdam(lr=0.25), name="a", seed=1),
        "b": HostTable(5, 2, RowWiseAdagrad(lr=0.5), name="b", seed=1),
    }
    runtime = Runtime(tables, device="cpu", depth=0)
    for number in (1, 2):
        for table in tables.values():
            ids = np.arange(number, table.rows, 8)
            table.update(ids, np.full((len(ids), table.dim), number, np.float32))
        runtime.pipeline.steps = number
        runtime.save(path / "c", extra={"number": number, "pair": (1, "x"), "tensor": torch.tensor([0.5, 1.5])})
    expected = {
        name: {
            "step": table.step,
            "lr": table.optimizer.lr,
            "block": table.block.tobytes().hex(),
            "row_slots": table.row_slots.tobytes().hex(),
        }
        for name, table in tables.items()
    }
    (path / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
