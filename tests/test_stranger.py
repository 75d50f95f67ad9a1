"""A package outside hostdev adds one of each kind of thing, and hostdev's checks find what is wrong with others."""

import dataclasses
import json
import subprocess
import sys
import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

import hostdev
from hostdev import testing
from hostdev.core import registry
from tests.conftest import ROOT, environment

STRANGER = ROOT / "tests/stranger"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the package's metadata, as if it were installed."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((STRANGER / "pyproject.toml").read_text())["project"]
    info = folder / "acme_recommender-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-recommender\nVersion: 1.0\n")
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in table.items()) for group, table in groups
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def acme(site, monkeypatch):
    """The package is installed."""
    for folder in (STRANGER, site):
        monkeypatch.syspath_prepend(folder)
    registry.clear()
    yield
    registry.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.fixture
def call(site, tmp_path):
    """Call `hostdev` in a process of its own that has the package."""

    def run(*arguments, code=0):
        env = environment(tmp_path)
        env["PYTHONPATH"] = ":".join(map(str, (STRANGER, site, ROOT)))
        command = [sys.executable, "-m", "hostdev", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def test_the_strangers_things_pass_their_checks(acme, tmp_path):
    from acme import checks

    checks.main(tmp_path)


def test_its_command_source_model_tracker_and_exporter(call, tmp_path):
    assert "greet" in call("--help") and "say hello" in call("--help")
    assert call("greet", "--name", "you") == "hello, you\n"
    assert call("greet", "--name", "", code=2) == "hostdev greet: error: --name must not be empty\n"
    roles = ("--label", "clicked", "--numeric", "price", "--categorical", "shop", "--bag", "seen")
    assert "training" in call("preprocess", "clicks", 3000, *roles, "--out", "data")
    assert json.loads((tmp_path / "data/manifest.json").read_text())["sources"][0]["source"] == "acme clicks"
    assert "scheduler" in call("preprocess", "clicks", 3000, *roles, "--out", "other", "--scheduler", "local:1", code=2)
    train = ("train", "--data", "data", "--device", "cpu", "--host-device-mix", "--epochs", 1, "--batch-size", 500)
    call(*train, "--model", "acme", "--run-dir", "run", "--checkpoint-every", 5, "--log-to", "jsonl")
    reported = [json.loads(line) for line in (tmp_path / "run/acme.jsonl").read_text().splitlines()]
    assert {"loss/wide_loss", "test/auc"} <= {line.get("tag") for line in reported}
    assert reported[-1] == {"status": "finished"}
    assert "choose one or more of jsonl,mlflow,tensorboard" in call(*train, "--log-to", "csv", code=2)
    export = ("checkpoint", "export", "run", "--format")
    assert "1 tables" in call(*export, "text", "--upper", "--out", "text")
    assert (tmp_path / "text/tables.txt").read_text().startswith("ALL ")
    error = call(*export, "text", "--slots", "--out", "other", code=2)
    assert "--slots has no effect with --format text" in error
    assert "--upper has no effect with --format npy" in call(*export, "npy", "--upper", "--out", "other", code=2)


def test_its_rules_in_a_file_of_options(call, tmp_path):
    roles = ("--label", "clicked", "--numeric", "price", "--categorical", "shop", "--bag", "seen", "--ids", "raw")
    call("preprocess", "clicks", 3000, *roles, "--out", "data")
    (tmp_path / "run.toml").write_text('admission = "acme.rules:Even"\neviction = "acme.rules:Rarest"\n')
    train = ("train", "--data", "data", "--device", "cpu", "--host-device-mix", "--epochs", 1, "--batch-size", 500)
    by_key = (*train, "--model", "acme", "--config", "run.toml", "--tables", "dynamic", "--capacity")
    call(*by_key, 50, "--run-dir", "run", "--checkpoint-every", 100)
    call("checkpoint", "export", "run", "--format", "parquet", "--out", "out")
    keys = pq.read_table(tmp_path / "out/all.parquet")["key"].to_numpy()
    assert 10 < len(keys) <= 50 and not (keys % 2).any()
    assert "--tables dynamic" in call(*train, "--config", "run.toml", code=2)
    (tmp_path / "run.toml").write_text('admission = "acme.rules:Odd"\n')
    assert "has no 'Odd'; its classes are Even, Rarest" in call(*by_key, 50, "--run-dir", "other", code=2)
    (tmp_path / "run.toml").write_text('admission = "acme.rules:Rarest"\n')
    assert "must be a hostdev.Admission" in call(*by_key, 50, "--run-dir", "other", code=2)


@dataclasses.dataclass(frozen=True)
class Counting(hostdev.Admission):
    """Depends on its own earlier answers."""

    seen: list = dataclasses.field(default_factory=list, compare=False, repr=False)

    def admit(self, keys, uses, *, seed, name, step):
        self.seen.append(1)
        return np.full(len(keys), len(self.seen) % 2 == 0)


@dataclasses.dataclass(frozen=True)
class Median(hostdev.Eviction):
    """Depends on the other keys."""

    every: int = 5
    keep: float = 0.8

    def scores(self, use):
        return np.abs(use.uses - np.median(use.uses)) if len(use) else np.zeros(0)


@dataclasses.dataclass(frozen=True)
class Wrong(hostdev.Admission):
    """Returns keys."""

    def admit(self, keys, uses, *, seed, name, step):
        return keys


class Forgetful(hostdev.RecordBatches):
    """Ignores the row to begin with."""

    def batches(self, columns, first):
        yield pa.RecordBatch.from_pydict({"a": [1, 2, 3]}).select(list(columns))


class Restless(nn.Module):
    """Draws from a generator of its own."""

    lr, default_dim = 1e-3, 4
    draws = np.random.default_rng(0)

    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__()
        self.tables = {"t": hostdev.TableSpec(schema.rows, dim, hostdev.SGD(lr=0.1))}
        self.features = {"ids": hostdev.Feature("t", pooling="sum")}
        self.top = nn.Linear(dim, 1)

    def ids(self, batch):
        return {"ids": hostdev.Bag(batch.ids)}

    def forward(self, dense, rows):
        return self.top(rows["ids"]).squeeze(1) * float(self.draws.random())


@pytest.mark.parametrize(
    ("check", "about"),
    [
        (lambda: testing.check_admission(Counting()), "answers differently"),
        (lambda: testing.check_admission(Wrong()), "bool"),
        (lambda: testing.check_eviction(Median()), "answers differently"),
        (lambda: testing.check_source(Forgetful("f", pa.schema({"a": pa.int64()}))), "from row 1 on"),
        (lambda: testing.check_model(Restless), "other bits"),
    ],
)
def test_what_breaks_a_promise_is_told(check, about):
    with pytest.raises(AssertionError, match=about):
        check()


@pytest.mark.parametrize(
    "rule",
    [
        hostdev.MinCount(2),
        hostdev.MinCount(3, expires=5),
        hostdev.MinCount(2, sketch="64KiB"),
        hostdev.Probability(0.3),
    ],
)
def test_our_rules_of_admission(rule):
    testing.check_admission(rule)


@pytest.mark.parametrize(
    "rule",
    [hostdev.Unused(5, every=3), hostdev.LeastRecent(), hostdev.LeastFrequent(decay=0.5), hostdev.SmallestNorm()],
)
def test_our_rules_of_eviction(rule):
    testing.check_eviction(rule)
