"""Runs whose models the tests serve: of films (bags, shared ids), of Criteo's columns, and of a typed Parquet file."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.commands import train
from hostdev.core import cli
from hostdev.data.preprocess import cli as preprocess
from tests.conftest import made_once
from tests.serving.helpers import Served

DEEPFM, WIDE_DEEP = ("--model", "deepfm"), ("--model", "wide_deep")


def run(module, *arguments):
    assert cli.run(module.PROG, module.main, list(map(str, arguments))) == 0


def trained(data, folder, *options):
    flags = ["--batch-size", 128, "--emb-dim", 4, "--epochs", 1, "--device", "cpu", "--checkpoint-every", 10]
    run(train, "--data", data, "--host-device-mix", *flags, *options, "--run-dir", folder)
    return folder / "checkpoints"


@pytest.fixture(scope="session")
def film_run(films, tmp_path_factory):
    folder = made_once(tmp_path_factory, "served-film", lambda folder: trained(films, folder / "run", *DEEPFM))
    return folder / "run/checkpoints"


@pytest.fixture(scope="session")
def criteo_run(small_data, tmp_path_factory):
    folder = made_once(
        tmp_path_factory, "served-criteo", lambda folder: trained(small_data, folder / "run", *WIDE_DEEP)
    )
    return folder / "run/checkpoints"


@pytest.fixture(scope="session")
def typed(tmp_path_factory):
    """Integers as ids, lists, a vector, two labels: a Parquet file's columns."""
    rng = np.random.default_rng(3)
    n = 600
    return pa.table(
        {
            "click": rng.integers(0, 2, n),
            "buy": rng.integers(0, 2, n),
            "shop": rng.integers(1, 40, n),
            "price": pa.array(rng.gamma(2, 5, n).astype(np.float32)),
            "is_new": pa.array(rng.random(n) < 0.5),
            "tags": pa.array([rng.choice(list("abcdef"), rng.integers(0, 4)).tolist() for _ in range(n)]),
            "emb": pa.array(rng.normal(size=(n, 3)).astype(np.float32).tolist(), pa.list_(pa.float32())),
        }
    )


@pytest.fixture(scope="session")
def typed_run(typed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("typed")
    pq.write_table(typed, folder / "t.parquet")
    flags = ["--label", "click,buy", "--numeric", "price", "--categorical", "shop,is_new", "--bag", "tags"]
    run(preprocess, "table", folder / "t.parquet", *flags, "--vector", "emb=3", "--out", folder / "data")
    return trained(folder / "data", folder / "run", "--model", "mmoe")


@pytest.fixture(scope="session")
def film_server(film_run):
    with Served(film_run) as served:
        yield served


@pytest.fixture(scope="session")
def typed_server(typed_run):
    with Served(typed_run) as served:
        yield served


@pytest.fixture(scope="session")
def criteo_server(criteo_run):
    with Served(criteo_run) as served:
        yield served
