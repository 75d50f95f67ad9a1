"""`checkpoint export --format onnx`: a network that ONNX Runtime computes as `Predictor` does."""

import ast
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

import hostdev
from hostdev.commands import train
from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.shards import ShardReader
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.neighbours import cli as neighbours
from hostdev.ext.predict import exporter, onnx_export
from tests.conftest import ROOT
from tests.data import movies
from tests.own_models import ThreeTables

onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
OPTIONS = ["--batch-size", 200, "--emb-dim", 4, "--device", "cpu", "--max-steps", 2, "--checkpoint-every", 2]
MODELS = ("wide_deep", "deepfm", "dlrm", "dcn", "shared_bottom", "mmoe", "tests.own_models:ThreeTables")


def call(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def two_labels(tmp_path_factory):
    """Films with a binary and a numeric label, weighted bags, and no dense column."""
    path = tmp_path_factory.mktemp("two")
    rows = movies.make(rows=1500, users=80, items=60)
    rows.columns["genres"] = [[f"{name}:{i + 1}" for i, name in enumerate(each)] for each in rows.columns["genres"]]
    made = rows.write_csv(path / "films.csv")
    (path / "f.toml").write_text(
        '[labels.liked]\n[labels.age]\ntask = "regression"\n[features.user]\nkind = "categorical"\n'
        '[features.genres]\nkind = "bag"\nseparator = "|"\nweights = ":"\n'
    )
    assert call(preprocess, "table", made, "--features", path / "f.toml", "--out", path / "data") == 0
    return path / "data"


def export(in_process, run, *more):
    code, out, error = in_process(checkpoint, "export", run, "--format", "onnx", "--out", "out", *more)
    assert (code, error) == (0, ""), error
    return out


def compute(data, run, **options):
    """Return the outputs of the written network for test rows by name, and the predictions."""
    predictor = hostdev.Predictor(run, **options)
    batch = next(ShardReader(data, manifest.read(data), "test").batches(50))
    session = onnxruntime.InferenceSession(Path("out/dense.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    rows, values = predictor.rows(batch), {"dense": batch.dense}
    for name, feature in predictor.model.features.items():
        if feature.is_single:
            values[f"rows.{name}"] = rows[name].float().numpy()
        else:
            values |= {f"rows.{name}.{table}": rows[name][i].float().numpy() for i, table in enumerate(feature.tables)}
    wanted = [one.name for one in session.get_inputs()]
    assert set(wanted) <= set(values)
    found = session.run(None, {name: values[name] for name in wanted})
    return dict(zip([one.name for one in session.get_outputs()], found, strict=True)), predictor.predict(batch)


def check_model(in_process, films, name, *more):
    own = ["--model", name] if ":" in name else []
    assert call(train, "--data", films, "--run-dir", "run", "--model", name, *OPTIONS, *more) == 0
    out = export(in_process, "run", *own)
    found, expected = compute(films, "run", model=name)
    assert found.keys() == {"probability"}
    np.testing.assert_allclose(found["probability"], expected, atol=1e-5)
    assert np.ptp(expected) > 1e-4  # the samples differ
    return out


def test_the_network_and_its_description(in_process, films):
    out = check_model(in_process, films, "deepfm")
    assert "dense.onnx: deepfm of step 2, opset 18, inputs dense, rows.fields.first_order, rows.fields.vectors, " in out
    written = onnx.load("out/dense.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert [(each.domain, each.version) for each in written.opset_import] == [("", 18)]
    about = json.loads(Path("out/dense.json").read_text())
    assert json.loads({each.key: each.value for each in written.metadata_props}["hostdev"]) == about
    assert (about["model"], about["step"], about["opset"]) == ("deepfm", 2, 18)
    assert about["outputs"] == [{"name": "probability", "label": "liked"}]
    by_name = {each["name"]: each for each in about["inputs"]}
    assert by_name["dense"] == {"name": "dense", "shape": ["batch", 1], "columns": ["age"]}
    assert by_name["rows.fields.vectors"] == {
        "name": "rows.fields.vectors",
        "shape": ["batch", 2, 4],
        "table": "vectors",
        "columns": ["user", "item"],
        "pooling": None,
        "weighted": False,
    }
    assert by_name["rows.bag:genres.vectors"]["pooling"] == "mean"
    shapes = {each.name: each.shape for each in onnxruntime.InferenceSession("out/dense.onnx").get_inputs()}
    assert shapes == {name: each["shape"] for name, each in by_name.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model(in_process, films, name):
    check_model(in_process, films, name)


@pytest.mark.slow
def test_tables_by_key(in_process, films):
    dynamic = ["--tables", "dynamic", "--capacity", 5000, "--host-device-mix"]
    check_model(in_process, films, "wide_deep", *dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared_bottom", "mmoe"])
def test_labels(in_process, two_labels, name):
    assert call(train, "--data", two_labels, "--run-dir", "run", "--model", name, *OPTIONS) == 0
    out = export(in_process, "run")
    assert "inputs rows.fields, rows.bag:genres, outputs probability_liked, prediction_age" in out
    found, expected = compute(two_labels, "run")
    for i, column in enumerate(("probability_liked", "prediction_age")):
        np.testing.assert_allclose(found[column], expected[:, i], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_is_exported_in_float32(in_process, films):
    assert call(train, "--data", films, "--run-dir", "run", "--model", "dcn", *OPTIONS, "--precision", "bf16") == 0
    assert "the run computes in bfloat16, and the network in float32: up to " in export(in_process, "run")
    found, expected = compute(films, "run", _in_float32=True)
    np.testing.assert_allclose(found["probability"], expected, atol=1e-5)


def test_the_commands_and_programs_in_the_guide(in_process, films, capsys):
    """The programs import nothing of hostdev, read what the commands have written, and print what hostdev gives."""
    pytest.importorskip("faiss")
    guide = (ROOT / "docs/guides/embeddings.md").read_text()
    index, server = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert "hostdev" not in index + server
    commands = [shlex.split(line) for line in re.findall(r"^    hostdev (.*)$", guide, re.MULTILINE)]
    modules = {"train": train, "neighbours": neighbours, "checkpoint": checkpoint}
    assert {command[0] for command in commands} == modules.keys()
    out = {}
    for command in commands:
        given = [str(films) if word == "data" else word for word in command[1:]]
        given += ["--batch-size", "64"] if command[0] == "train" else []  # the test's films are few
        code, out[command[0]], error = in_process(modules[command[0]], *given)
        assert code == 0, error
    exec(index, {})
    names = ast.literal_eval(capsys.readouterr().out)
    assert names == ["m0001", *(line.split()[3] for line in out["neighbours"].splitlines()[3:])]
    program = {}
    exec(server, program)
    largest = manifest.read(films).statistics["dense_max"][0]
    predict = hostdev.Predictor("run")
    for user, genres, history in (("u1", ["Drama", "War"], ["m0005", "m0007"]), ("nobody", [], ["m0001"])):
        row = {"user": user, "item": "m0001", "age": 0.5 * largest, "genres": genres, "history": history}
        found = program["predict"](user, "m0001", 0.5, genres, history)
        np.testing.assert_allclose(found, predict(row), atol=1e-5)


class Unknown(ThreeTables):
    """A model with an operation that ONNX does not have."""

    def forward(self, dense, rows):
        return super().forward(dense, rows) + torch.linalg.svdvals(dense).sum()


@pytest.mark.slow
def test_a_network_that_torch_cannot_write(in_process, films, monkeypatch):
    options = ["--data", films, "--run-dir", "run", "--model", MODELS[-1], *OPTIONS]
    assert in_process(train, *options)[0] == 0
    given = ["export", "run", "--format", "onnx", "--out", "out"]
    code, _, error = in_process(checkpoint, *given)
    assert code == 2 and "has the custom model class" in error
    monkeypatch.setattr("tests.own_models.ThreeTables", Unknown)
    code, out, error = in_process(checkpoint, *given, "--model", MODELS[-1])
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "the network of model 'tests.own_models:ThreeTables' cannot be written as ONNX: " in error


def test_the_run_of_a_program_of_its_own_names_torchs_exporter(in_process, tmp_path):
    hostdev.Runtime({"t": hostdev.HostTable(5, 2, hostdev.SGD(), name="t")}, device="cpu").save(tmp_path / "own")
    code, _, error = in_process(checkpoint, "export", tmp_path / "own", "--format", "onnx", "--out", "out")
    assert code == 2 and error.count("\n") == 1
    assert "torch.onnx.export" in error and "Runtime.save" in error and "--format parquet" in error


def test_a_wrong_network_is_told(in_process, films, monkeypatch):
    assert in_process(train, "--data", films, "--run-dir", "run", "--model", "shared_bottom", *OPTIONS)[0] == 0
    monkeypatch.setattr(onnx_export, "_convert", lambda *_: b"")
    monkeypatch.setattr(onnx_export, "_compute", lambda content, values: np.zeros(len(values["dense"]), np.float32))
    code, out, error = in_process(checkpoint, "export", "run", "--format", "onnx", "--out", "out")
    assert (code, out) == (2, "") and "differs from the predictions by up to " in error
    for options, message in (
        (["--slots"], "--slots has no effect with --format onnx"),
        (["--column", "item"], "--column has no effect with --format onnx, only with faiss"),
    ):
        code, _, error = in_process(checkpoint, "export", "run", "--format", "onnx", "--out", "out", *options)
        assert code == 2 and message in error
    monkeypatch.setattr(exporter, "import_module", lambda name: __import__("not_there"))
    code, _, error = in_process(checkpoint, "export", "run", "--format", "onnx", "--out", "out")
    assert code == 2 and "pip install 'hostdev[onnx]'" in error
