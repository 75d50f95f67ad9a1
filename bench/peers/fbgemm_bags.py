"""Batches of bags with FBGEMM's CPU kernels: forward and backward passes with exact row-wise Adagrad."""

import sys
from functools import partial
from importlib.metadata import version

from serve import serve  # isort: skip  (finds workload.py)
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from workload import draw_bags

rows, *cases = int(sys.argv[1]), *sys.argv[2:]


def make(dim):
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=1e-3,
        pooling_mode=PoolingMode.SUM,
    )


def step(bag, values, offsets, g):
    bag(values, offsets).backward(g)


tables = {dim: make(dim) for dim in {int(case.split()[0]) for case in cases}}
ops = {}
for case in cases:
    ids, grads = draw_bags(rows, case)
    offsets = torch.arange(0, ids.size + 1, ids.shape[1])
    table = tables[grads.shape[1]]
    ops[case] = partial(step, table, torch.from_numpy(ids.ravel()), offsets, torch.from_numpy(grads))
serve(ops, {"torch": torch.__version__, "fbgemm-gpu-cpu": version("fbgemm-gpu-cpu")})
