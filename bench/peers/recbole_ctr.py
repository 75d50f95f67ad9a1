"""RecBole's own configuration of a model on its ml-100k: split, training and test AUC; prints JSON.

The split is written to FOLDER as train.csv and test.csv, so that hostdev can train on the same rows.
"""

import json
import sys
import time
from pathlib import Path

import pandas as pd
import recbole
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.utils import get_model, get_trainer, init_seed

OPTIONS = {
    "load_col": {
        "inter": ["user_id", "item_id", "rating"],
        "user": ["user_id", "age", "gender", "occupation"],
        "item": ["item_id", "release_year", "class"],
    },
    "threshold": {"rating": 4},
    "metrics": ["AUC"],
    "valid_metric": "AUC",
    "metric_decimal_place": 6,
    "eval_args": {"split": {"RS": [0.8, 0.1, 0.1]}, "order": "RO", "group_by": None, "mode": "labeled"},
    "eval_step": 1000,
    "show_progress": False,
}
ARCHITECTURE = ("embedding_size", "mlp_hidden_size", "dropout_prob", "learning_rate", "train_batch_size")


def write_rows(dataset, path):
    """Write a part of the data set as CSV, with RecBole's numbers of the values; 0 pads the lists."""
    columns = {}
    for feature in (dataset.inter_feat, dataset.user_feat, dataset.item_feat):
        key = {"age": "user_id", "release_year": "item_id"}
        owner = next((of for field, of in key.items() if field in feature.interaction), None)
        for name, values in feature.interaction.items():
            if name in columns:
                continue
            rows = values if owner is None else values[torch.as_tensor(columns[owner])]
            columns[name] = (
                rows.numpy() if rows.dim() == 1 else [" ".join(str(v) for v in r if v) for r in rows.tolist()]
            )
    frame = pd.DataFrame(columns)
    frame["label"] = frame["label"].astype(int)
    frame.to_csv(path, index=False)


def main():
    """Train and evaluate."""
    name, epochs, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    config = Config(model=name, dataset="ml-100k", config_dict={**OPTIONS, "epochs": epochs})
    init_seed(config["seed"], config["reproducibility"])
    dataset = create_dataset(config)
    train, _, test = data_preparation(config, dataset)
    for part, path in ((train, "train.csv"), (test, "test.csv")):
        write_rows(part.dataset, folder / path)
    model = get_model(name)(config, train.dataset)
    trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
    begun = time.perf_counter()
    trainer.fit(train, saved=False, show_progress=False)
    seconds = time.perf_counter() - begun
    found = {
        "auc": float(trainer.evaluate(test, load_best_model=False)["auc"]),
        "samples_per_second": epochs * len(train.dataset) / seconds,
        "config": {key: config[key] for key in (*ARCHITECTURE, *(["cross_layer_num"] if name == "DCNV2" else []))},
        "versions": {"recbole": recbole.__version__, "torch": torch.__version__},
    }
    print(json.dumps(found))


main()
