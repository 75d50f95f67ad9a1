"""Torch's operations on the CPU: index_select into a buffer and SparseAdam; FBGEMM's embedding if installed."""

import sys

from serve import serve  # isort: skip  (finds workload.py)
import torch
from workload import DIM, draw_gradients, draw_ids

rows = int(sys.argv[1])
versions = {"torch": torch.__version__}
ids_np = draw_ids(rows)
ids, g = torch.from_numpy(ids_np), torch.from_numpy(draw_gradients(len(ids_np), DIM))
w = torch.nn.Parameter(torch.zeros(rows, DIM))
out = torch.empty(len(ids), DIM)
opt = torch.optim.SparseAdam([w], lr=3.5e-4)


def sparse_adam():
    w.grad = torch.sparse_coo_tensor(ids[None], g, w.shape, check_invariants=False)
    opt.step()


ops = {"index_select": lambda: torch.index_select(w.data, 0, ids, out=out), "sparse adam": sparse_adam}
try:
    if rows > 1_000_000:
        raise ImportError("two more tables do not fit in memory beside those of the other systems")
    from importlib.metadata import version

    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        OptimType,
        PoolingMode,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
except ImportError:
    pass
else:
    versions["fbgemm-gpu-cpu"] = version("fbgemm-gpu-cpu")
    offsets = torch.arange(len(ids) + 1)
    for name, kind in (("adagrad", OptimType.EXACT_ADAGRAD), ("row-wise adagrad", OptimType.EXACT_ROWWISE_ADAGRAD)):
        bag = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=kind,
            learning_rate=1e-3,
            pooling_mode=PoolingMode.SUM,
        )
        ops[f"fbgemm forward {name}"] = lambda bag=bag: bag(ids, offsets)
        ops[f"fbgemm forward, backward, {name}"] = lambda bag=bag: bag(ids, offsets).backward(g)
serve(ops, versions)
