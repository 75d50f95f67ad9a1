"""Each feature in each mode: the same bits. Quick rungs have the strongest mode of each, and a sixth of the others."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from hostdev.core import cli
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.training import cli as train
from tests.conftest import made_once
from tests.data import events
from tests.modes.features import FEATURES, MODES, VECTORS, is_possible, strongest


@pytest.fixture(scope="session")
def sets(small_data, films, tmp_path_factory):
    """Return data sets by the names that features.py uses; "targets" has a file of vectors beside it."""

    def make(folder):
        pyarrow.csv.write_csv(events.make(days=3, rows=400), folder / "events.csv")
        flags = ["--label", "clicked", "--numeric", "hour", "--categorical", "user,item,device", "--ids", "raw"]
        command = ["table", folder / "events.csv", "--out", folder / "raw", *flags, "--test-after", "day=1"]
        preprocess.main(list(map(str, command)))

    def make_targets(folder):
        rng = np.random.default_rng(4)
        users, tags = rng.integers(0, 30, 800), rng.random((800, 6)).round(3)
        columns = {
            "user": [f"u{user}" for user in users],
            "tags": ["|".join(f"t{i}:{w}" for i, w in enumerate(row) if w < 0.4) for row in tags],
            "price": rng.random(800),
            "clicked": users % 3 == 0,
            "bought": tags[:, 0] < 0.2,
            "weight": 1.0 + users % 2,
        }
        pq.write_table(pa.table(columns), folder / "rows.parquet")
        flags = ["--label", "clicked,bought", "--weight", "weight", "--numeric", "price", "--categorical", "user"]
        flags += ["--bag", "tags=|", "--bag-weights", "tags=:", "--threshold", 0]
        preprocess.main(list(map(str, ["table", folder / "rows.parquet", "--out", folder / "data", *flags])))
        vectors = pa.table({"user": [f"u{user}" for user in range(20)], "vector": rng.normal(size=(20, 8)).tolist()})
        pq.write_table(vectors, folder / "vectors.parquet")

    return {
        "small": small_data,
        "films": films,
        "events": made_once(tmp_path_factory, "events", make) / "raw",
        "targets": made_once(tmp_path_factory, "targets", make_targets) / "data",
    }


def trained(sets, feature, mode, device, folder, *more):
    """Train in a mode; return the digest of the state, and the logs of losses and evaluations."""
    kind = FEATURES[feature]
    flags = ["--data", sets[kind.data], "--batch-size", 100, "--emb-dim", 8, "--max-steps", 7, "--seed", 3]
    flags += ["--device", device.type, "--run-dir", folder / "run", *kind.flags, *MODES[mode], *more]
    placed = {"disk": folder / "disk", VECTORS[1]: f"user={sets['targets'].parent / 'vectors.parquet'}"}
    flags = [placed.get(flag, flag) for flag in flags]
    assert cli.run(train.PROG, train.main, list(map(str, flags))) == 0
    summary = json.loads((folder / "run/summary.json").read_text())
    return [summary["state_sha256"], *((folder / f"run/{name}.log").read_text() for name in ("loss", "eval"))]


@pytest.fixture
def serial(sets, device, tmp_path_factory):
    """Return what a feature comes to in the first mode; trained once."""

    def get(feature):
        def make(folder):
            (folder / "result.json").write_text(json.dumps(trained(sets, feature, "serial", device, folder)))

        name = f"serial-{device.type}-{feature.replace(' ', '-')}"
        return json.loads((made_once(tmp_path_factory, name, make) / "result.json").read_text())

    return get


def cases():
    for name, feature in FEATURES.items():
        for mode in MODES:
            if mode != "serial" and is_possible(feature, mode):
                marks = [] if mode == strongest(feature) else [pytest.mark.drawn(10)]
                marks += [] if feature.quick else [pytest.mark.slow_on_standin]
                yield pytest.param(name, mode, id=f"{name}-{mode}", marks=marks)


@pytest.mark.parametrize(("feature", "mode"), list(cases()))
def test_the_bits_are_those_of_the_serial_training(sets, serial, device, tmp_path, feature, mode):
    assert trained(sets, feature, mode, device, tmp_path) == serial(feature)


@pytest.mark.parametrize("feature", ["plain", "keys"])
def test_another_seed_has_other_bits(sets, serial, device, tmp_path, feature):
    found = trained(sets, feature, "depth 2", device, tmp_path, "--seed", 1)
    assert all(other != expected for other, expected in zip(found, serial(feature), strict=True))


def test_features_differ(sets, serial, device):
    """Or a flag would do nothing."""
    names = [name for name, feature in FEATURES.items() if feature.quick]
    assert len({serial(name)[0] for name in names}) == len(names)
