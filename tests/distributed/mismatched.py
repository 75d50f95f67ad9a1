"""A loop of one's own on two processes, in which one rank does something that the others do not.

python -m tests.distributed.mismatched WHAT RANK
"""

import sys
import tempfile
import time

import numpy as np
import torch

import hostdev

IDS = {"f": np.arange(3)}
AT = 3  # the step in which it happens


def act(what, runtime, loop):
    """Do it, in the loop's body, on one rank."""
    if what == "predict":
        for _ in runtime.predict([IDS]):
            pass
    elif what == "lookup":
        runtime.lookup(IDS)
    elif what == "save":
        runtime.save("checkpoints")
    elif what == "rate":
        runtime.tables["a"].optimizer.lr = 0.5
    elif what == "freeze":
        runtime.freeze()
    elif what == "close":
        loop.close()
    elif what == "raise":
        raise ValueError("a program's own error")
    elif what.startswith("exit"):
        sys.exit(int(what[4:]))
    elif what == "sleep":
        time.sleep(60)  # it lives, and does not come: longer than the others wait


def main(what, rank):
    with hostdev.join(timeout=12.0 if what == "sleep" else 60.0) as ranks:
        mine = ranks.rank == int(rank)
        seed = 1 + (what == "seed" and mine)
        name = "b" if what == "name" and mine else "a"
        how = {what: "bfloat16"} if what in ("dtype", "slots") and mine else {}
        if what == "storage" and mine:
            how = {"storage": hostdev.Disk(tempfile.mkdtemp(), "40MB")}
        table = hostdev.HostTable(50, 4, hostdev.SGD(lr=0.1), name=name, seed=seed, part=ranks.part(), **how)
        runtime = hostdev.Runtime({"f": table}, device="cpu", ranks=ranks)
        torch.manual_seed(what == "weights" and mine)
        model = torch.nn.Linear(4, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [{"f": np.arange(8) + ranks.rank}] * 8
        loop = runtime.train(batches, micro_batches=1 + (what == "micro_batches" and mine))
        for step, (_, rows) in enumerate(loop, 1):
            model(rows["f"]).sum().backward()
            rows.reduce(model.parameters())
            sgd.step()
            sgd.zero_grad()
            if step == AT and (mine or what == "exit_all"):
                act("exit0" if what == "exit_all" else what, runtime, loop)
                if what == "break":
                    break
        if what == "evaluate":
            runtime.lookup(IDS) if mine else runtime.save("checkpoints")


if __name__ == "__main__":
    main(*sys.argv[1:])
