"""A model of hostdev with a peer's configuration on its split in FOLDER (train.csv, test.csv); prints JSON."""

import itertools
import json
import sys
import time
from pathlib import Path

import torch

import hostdev
from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.shards import ShardReader
from hostdev.models import make
from hostdev.train.trainer import Trainer


def main():
    """Prepare, train and evaluate."""
    name, epochs, folder, config = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    data = folder / "data"
    flags = ["--test", str(folder / "test.csv"), *config["roles"], "--out", str(data)]
    if not data.exists() and cli.run(preprocess.PROG, preprocess.main, ["table", str(folder / "train.csv"), *flags]):
        raise SystemExit("the split could not be prepared")
    found = manifest.read(data)
    reader, size = ShardReader(data, found, "train"), config["batch_size"]

    def make_trainer():
        torch.manual_seed(1)
        rate = config["learning_rate"]
        optimizer = hostdev.LazyAdam(lr=rate)
        model = make(name, found.schema, config["dim"], seed=1, optimizer=optimizer, **config["options"])
        device = torch.device("cpu")
        return Trainer(model, host_device_mix=True, device=device, seed=1, lr=rate, depth=2)

    for _ in make_trainer().train(itertools.islice(reader.batches(size), 2)):  # compiles the kernels
        pass
    trainer = make_trainer()
    begun = time.perf_counter()
    for epoch in range(epochs):
        for result in trainer.train(reader.batches(size, seed=1, epoch=epoch)):
            assert result.rows
    seconds = time.perf_counter() - begun
    test = trainer.evaluate(ShardReader(data, found, "test").batches(size))
    speed = epochs * reader.rows / seconds
    print(json.dumps({"auc": test.auc, "samples_per_second": speed, "versions": {"hostdev": hostdev.__version__}}))


main()
