"""The DLRM's training step with TorchRec's fused tables on the CPU: FBGEMM's row-wise Adagrad in the backward pass."""

import sys
import warnings
from importlib.metadata import version

from dlrm import DIM, NAMES, ROWS, TABLES, run  # isort: skip  (finds workload.py)
import torch

warnings.filterwarnings("ignore")
import torchrec  # noqa: E402
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # noqa: E402

tables = FusedEmbeddingBagCollection(
    [
        torchrec.EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in NAMES
    ],
    optimizer_type=torchrec.optim.RowWiseAdagrad,
    optimizer_kwargs={"lr": 0.01},
    device=torch.device("cpu"),
)
features = {}


def look_up(ids):
    """Return a function of vectors [B, 26, D]; a batch's features are made once, outside of the time."""
    if id(ids) not in features:
        batch, count = ids.shape[1:]
        lengths = torch.full((TABLES * batch,), count, dtype=torch.int32)
        features[id(ids)] = torchrec.KeyedJaggedTensor(
            keys=NAMES, values=torch.from_numpy(ids.reshape(-1)), lengths=lengths
        )
    made = features[id(ids)]
    return lambda: tables(made).values().view(-1, TABLES, DIM)


assert sys.argv[2] == "rowwise"
run(
    {name: version(name) for name in ("torchrec", "fbgemm-gpu-cpu")},
    lambda batches: ((batch, look_up(batch[0])) for batch in batches),
)
