"""The DLRM's training step in hostdev's loop, at the depth of the command line; rows as a stack [B, 26, D]."""

import sys

from dlrm import DIM, NAMES, ROWS, run  # isort: skip  (finds workload.py)
import hostdev

depth, optimizer = int(sys.argv[3]), {"rowwise": hostdev.RowWiseAdagrad(lr=0.01), "adam": hostdev.LazyAdam(lr=1e-3)}
features = {
    name: hostdev.Feature(hostdev.HostTable(ROWS, DIM, optimizer[sys.argv[2]], name=name), pooling="sum")
    for name in NAMES
}
runtime = hostdev.Runtime(features, device="cpu", depth=depth, stacks={"vectors": NAMES})


def loop(batches):
    """Yield a batch and its vectors."""
    for batch, rows in runtime.train(
        batches, ids=lambda batch: dict(zip(NAMES, batch[0], strict=True)), read_ahead=True
    ):
        yield batch, lambda rows=rows: rows["vectors"]


run({"hostdev": hostdev.__version__}, loop)
