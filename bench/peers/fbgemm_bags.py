"""A batch of bags with FBGEMM's CPU kernels: forward and backward passes with exact row-wise Adagrad."""

import sys
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
from workload import BAG_DIM, draw_bags

rows = int(sys.argv[1])
ids, grads = draw_bags(rows)
values, g = torch.from_numpy(ids.ravel()), torch.from_numpy(grads)
offsets = torch.arange(0, ids.size + 1, ids.shape[1])
bag = SplitTableBatchedEmbeddingBagsCodegen(
    [(rows, BAG_DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
    optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
    learning_rate=1e-3,
    pooling_mode=PoolingMode.SUM,
)


def step():
    bag(values, offsets).backward(g)


serve({"lookup, pooling, update": step}, {"torch": torch.__version__, "fbgemm-gpu-cpu": version("fbgemm-gpu-cpu")})
