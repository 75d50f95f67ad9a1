"""DeepFM or DCNv2 of FuxiCTR's layers with its default settings, on FOLDER's train.csv and test.csv; prints JSON."""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from fuxictr.features import FeatureMap
from fuxictr.preprocess import FeatureProcessor, build_dataset
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import CrossNetV2, FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything

SETTINGS = {  # of model_config.yaml's *_default, but for the sizes of a batch and of layers below
    "loss": "binary_crossentropy",
    "metrics": ["logloss", "AUC"],
    "task": "binary_classification",
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "batch_size": 2048,
    "embedding_dim": {"DeepFM": 10, "DCNv2": 40},
    "hidden_units": {"DeepFM": [64, 64, 64], "DCNv2": [500, 500, 500]},
    "cross_layers": 3,
}


class Network(BaseModel):
    """DeepFM, or DCNv2 with parallel cross and dense layers."""

    def __init__(self, feature_map, name, **params):
        super().__init__(feature_map, model_id=name, gpu=-1, **params)
        dim, hidden = (SETTINGS[key][name] for key in ("embedding_dim", "hidden_units"))
        self.embedding_layer = FeatureEmbedding(feature_map, dim)
        inputs = len(feature_map.features) * dim
        self.fm = FactorizationMachine(feature_map) if name == "DeepFM" else None
        self.cross = None if name == "DeepFM" else CrossNetV2(inputs, SETTINGS["cross_layers"])
        outputs = 1 if name == "DeepFM" else None
        self.mlp = MLP_Block(inputs, hidden, "ReLU", output_dim=outputs)
        self.last = None if name == "DeepFM" else torch.nn.Linear(inputs + hidden[-1], 1)
        self.compile(SETTINGS["optimizer"], SETTINGS["loss"], SETTINGS["learning_rate"])
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs):
        """Return probabilities as FuxiCTR's trainer expects them."""
        values = self.get_inputs(inputs)
        vectors = self.embedding_layer(values)
        flat = vectors.flatten(start_dim=1)
        if self.fm is not None:
            found = self.fm(values, vectors) + self.mlp(flat)
        else:
            found = self.last(torch.cat([self.cross(flat), self.mlp(flat)], dim=-1))
        return {"y_pred": self.output_activation(found)}


def main():
    """Prepare, train and evaluate."""
    name, epochs, folder, columns = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    numeric = {"active": True, "dtype": "float", "type": "numeric", "fill_na": 0, "normalizer": "MinMaxScaler"}
    with tempfile.TemporaryDirectory() as root:
        files = {f"{part}_data": str(folder / f"{part}.csv") for part in ("train", "test")}
        params = {
            **SETTINGS,
            **files,
            "valid_data": files["test_data"],
            "dataset_id": "ctr",
            "data_root": root,
            "model_root": root,
            "data_format": "csv",
            "feature_cols": [
                *([{**numeric, "name": columns["numeric"]}] if columns["numeric"] else []),
                {"name": columns["categorical"], "active": True, "dtype": "str", "type": "categorical"},
            ],
            "label_col": {"name": "label", "dtype": "float"},
            "min_categr_count": columns["threshold"],
            "num_workers": 1,
            "verbose": 0,
            "seed": 2019,
            "monitor": "AUC",
            "monitor_mode": "max",
            "shuffle": True,
        }
        seed_everything(seed=params["seed"])
        paths = build_dataset(FeatureProcessor(**params), **params)
        params |= dict(zip(("train_data", "valid_data", "test_data"), paths, strict=True))
        feature_map = FeatureMap("ctr", f"{root}/ctr")
        feature_map.load(f"{root}/ctr/feature_map.json", params)
        model = Network(feature_map, name, **params)
        train, _ = RankDataLoader(feature_map, stage="train", **params)
        model._max_gradient_norm = 10.0  # the default of its `fit`
        model.train()
        begun = time.perf_counter()
        for _ in range(epochs):
            for batch in train:
                model.train_step(batch)
        speed = epochs * train.num_samples / (time.perf_counter() - begun)
        auc = model.evaluate(RankDataLoader(feature_map, stage="test", **params))["AUC"]
    print(json.dumps({"auc": float(auc), "samples_per_second": speed, "versions": {"fuxictr": version("fuxictr")}}))


main()
