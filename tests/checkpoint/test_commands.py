"""`python -m hostdev.checkpoint`: what it prints, what it merges, what it writes for others."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from hostdev.checkpoint import folder, manifest, remote
from hostdev.checkpoint.layers import Layers
from hostdev.core import cli
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.checkpoints import compact, diff
from hostdev.ext.training import cli as train

OWN = ["--model", "tests.own_models:ThreeTables"]


def run(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, of Wide & Deep and of three groups, with a full checkpoint and increments."""
    path = tmp_path_factory.mktemp("runs")
    assert run(preprocess, "synthetic", "--rows", 6000, "--threshold", 0, "--out", path / "data") == 0
    options = ["--data", path / "data", "--batch-size", 100, "--emb-dim", 4, "--epochs", 1, "--device", "cpu"]
    save = ["--host-device-mix", "--checkpoint-every", 1, "--max-steps", 3, "--keep-checkpoints", 9]
    assert run(train, *options, *save, "--run-dir", path / "wide") == 0
    assert run(train, *options, *save, "--run-dir", path / "own", *OWN) == 0
    return path


@pytest.fixture(params=["wide", "own"])
def saved(request, runs, tmp_path):
    """Copy one of the runs; return it with its digest."""
    shutil.copytree(runs / request.param / "checkpoints", tmp_path / "c")
    return tmp_path / "c", json.loads((runs / request.param / "summary.json").read_text())["state_sha256"]


def test_some_add_to_others(saved):
    path, _ = saved
    parents = [manifest.read(path / name).parent for name in folder.names_in(path)]
    assert parents[0] is None
    assert [parent.name for parent in parents[1:]] == folder.names_in(path)[:-1]


def test_info_and_verify(saved, capsys):
    path, digest = saved
    assert run(checkpoint, "info", path) == 0
    out = capsys.readouterr().out
    names = folder.names_in(path)
    assert names == ["step-0000000001", "step-0000000002", "step-0000000003", "step-0000000003.2"]
    assert [line.split()[0] for line in out.splitlines()[1:5]] == names
    assert "all rows" in out
    assert "rows since step-0000000001 " in out
    assert f"state_sha256 {digest}" in out
    assert run(checkpoint, "verify", path) == 0
    out = capsys.readouterr().out
    assert out.count(": intact") == len(folder.read_chain(path / names[-1]))
    assert f"state_sha256 {digest}, as the manifest says" in out
    assert run(checkpoint, "verify", path / names[1]) == 0
    file = next((path / names[1]).rglob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    capsys.readouterr()
    assert run(checkpoint, "verify", path) == 2
    out, err = capsys.readouterr()
    assert err.startswith(
        f"hostdev.checkpoint: error: 3 of 4 checkpoints in {path} are damaged: {', '.join(names[1:])}"
    )
    assert f"{file} is broken (its checksum is wrong)" in err
    assert f"{path / names[0]}: " in out
    assert (out.count(": intact"), out.count(": damaged: ")) == (1, 3)
    assert run(checkpoint, "verify", path / names[0]) == 0
    assert run(checkpoint, "verify", path / names[2]) == 2
    assert capsys.readouterr().err == f"hostdev.checkpoint: error: {file} is broken (its checksum is wrong)\n"


def test_a_damaged_manifest_is_told_of(saved, tmp_path, capsys):
    """Commands on the newest checkpoint use an older valid one, and report it on standard error; `verify` reads all."""
    path, _ = saved
    names = folder.names_in(path)
    file = path / names[-1] / "checkpoint.json"
    file.write_text(file.read_text().replace('"step": 3', '"step": 4', 1))
    reason = f"{file} is broken (its checksum is wrong)"
    assert run(checkpoint, "verify", path) == 2
    out, err = capsys.readouterr()
    assert err == f"hostdev.checkpoint: error: 1 of 4 checkpoints in {path} is damaged: {names[-1]}: {reason}\n"
    assert [line.endswith(": intact") for line in out.splitlines()] == [True, True, True, False]
    assert f"{path / names[-1]}: damaged: {reason}" in out
    taken = f"{reason}; using an older one: {path / names[-2]}\n"
    assert run(checkpoint, "export", path, "--out", tmp_path / "out") == 0
    assert capsys.readouterr().err == f"hostdev.checkpoint: {taken}"
    assert run(checkpoint, "diff", path, path / names[-2]) == 0
    assert capsys.readouterr().err == f"hostdev.checkpoint: {taken}"
    assert run(checkpoint, "compact", path) == 0
    assert capsys.readouterr().err == f"hostdev.checkpoint: {taken}"


@pytest.mark.parametrize("name", ["tables/0/000000.arrow", "data/vocabulary.arrow", "dense.safetensors"])
def test_damaged_data_is_not_exported(saved, tmp_path, capsys, name):
    path, _ = saved
    chain = remote.newest(path).chain
    file = next(each.path / name for each in chain if (each.path / name).exists())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert run(checkpoint, "export", path, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == f"hostdev.checkpoint: error: {file} is broken (its checksum is wrong)\n"
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("form", ["parquet", "npy", "safetensors"])
def test_a_full_disk_is_named(saved, tmp_path, capsys, monkeypatch, form):
    path, _ = saved

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Layers, "read", fail)
    assert run(checkpoint, "export", path, "--out", tmp_path / "out", "--format", form) == 2
    expected = f"hostdev.checkpoint: error: {tmp_path / 'out'}: No space left on device\n"
    assert capsys.readouterr().err == expected
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_run_directory_stands_for_its_checkpoints(runs, tmp_path, capsys):
    for command in ("info", "verify", "compact"):
        shutil.copytree(runs / "wide", tmp_path / command)
        assert run(checkpoint, command, tmp_path / command) == 0
        assert f"{command}/checkpoints" in capsys.readouterr().out
    assert run(checkpoint, "diff", runs / "wide", tmp_path / "compact") == 0
    assert run(checkpoint, "export", runs / "wide", "--out", tmp_path / "out") == 0
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    assert run(checkpoint, "info", tmp_path / "empty") == 2
    assert f"{tmp_path / 'empty'} has no checkpoint" in capsys.readouterr().err


def test_diff(saved, capsys):
    path, _ = saved
    names = folder.names_in(path)
    assert run(checkpoint, "diff", path / names[-1], path / names[-1]) == 0
    assert capsys.readouterr().out == "equal\n"
    assert run(checkpoint, "diff", path / names[0], path / names[1]) == 1
    out = capsys.readouterr().out
    assert "step: 1 and 2" in out
    a, b = (Layers(folder.read_chain(path / name)) for name in names[:2])
    for table in a.manifest.tables:
        x, y = (np.concatenate(list(layers.column(table.name, "weights"))) for layers in (a, b))
        rows = np.flatnonzero((x != y).any(1))
        line = f"table {table.name}, weights: {len(rows):,} of {table.rows:,} rows differ (first row {rows[0]}), by"
        assert line in out


def test_a_difference_of_nan_is_named():
    blocks = [np.ones((3, 2), np.float32) for _ in range(3)]
    blocks[1][1, 0] = np.nan
    blocks[2][2, 1] = 3
    about = {"optimizer": "SGD", "dtype": "fp32", "slots_dtype": "fp32", "step": 1, "arguments": {}, "history": None}
    table = SimpleNamespace(name="t", rows=3, dim=2, keys=None, slots=(), row_slots=(), **about)
    for other, by in ((1, "some by NaN"), (2, "by at most 2")):
        parts = [SimpleNamespace(column=lambda name, column, block=blocks[n]: iter([block])) for n in (0, other)]
        assert diff._compare_tables(*parts, table, table) == [
            f"table t, weights: 1 of 3 rows differ (first row {other}), {by}"
        ]


@pytest.mark.parametrize("keep", [None, 1])
def test_compact(saved, capsys, keep):
    path, digest = saved
    before = folder.names_in(path)
    shutil.copytree(path, path.with_name("copy"))
    assert run(checkpoint, "compact", path, *([] if keep is None else ["--keep", keep])) == 0
    assert "4 checkpoints merged into one" in capsys.readouterr().out
    merged = "step-0000000003.3"
    assert folder.names_in(path) == ([*before[:-1], merged] if keep is None else [merged])
    assert manifest.read(path / merged).parent is None
    assert run(checkpoint, "verify", path) == 0
    assert f"state_sha256 {digest}, as the manifest says" in capsys.readouterr().out
    assert run(checkpoint, "diff", path, path.with_name("copy")) == 0
    assert run(checkpoint, "compact", path) == 0
    assert "is already a full checkpoint" in capsys.readouterr().out


def test_what_others_add_to_stays(saved):
    path, _ = saved
    names = folder.names_in(path)
    assert run(checkpoint, "compact", path / names[1]) == 0
    assert set(names) < set(folder.names_in(path))
    for name in folder.names_in(path):
        assert run(checkpoint, "verify", path / name) == 0


def test_compact_while_another_process_writes(saved, capsys):
    path, _ = saved
    with folder.locked(path):
        assert run(checkpoint, "compact", path) == 2
    assert "is in use" in capsys.readouterr().err


def test_a_compaction_that_fails_changes_nothing(saved, monkeypatch):
    path, _ = saved
    before = folder.names_in(path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compact._MergedRows, "read", fail)
    assert run(checkpoint, "compact", path) == 2
    assert folder.names_in(path) == before
    monkeypatch.undo()
    assert run(checkpoint, "compact", path) == 0


@pytest.mark.parametrize("form", ["parquet", "npy", "safetensors"])
def test_export_is_read_by_others(saved, tmp_path, form):
    path, _ = saved
    out = tmp_path / "out"
    assert run(checkpoint, "export", path, "--out", out, "--format", form, "--slots") == 0
    layers = Layers(folder.read_chain(path / folder.names_in(path)[-1]))
    for table in layers.manifest.tables:
        for name in ("weights", *table.slots, *table.row_slots):
            expected = np.concatenate(list(layers.column(table.name, name)))
            if form == "npy":
                found = np.load(out / f"{table.name}.{name}.npy")
            elif form == "safetensors":
                found = load_file(out / f"{table.name}.safetensors")[name].numpy()
            else:
                found = np.stack(pd.read_parquet(out / f"{table.name}.parquet")[name])
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    dense = torch.load(out / "dense.pt", weights_only=True)
    assert dense.keys() == {key.removeprefix("model.") for key in layers.manifest.state["dense"]["model"]}
    ids = pq.read_table(out / ("ids.parquet" if form != "parquet" else f"{layers.manifest.tables[0].name}.parquet"))
    frame = ids.to_pandas()
    assert frame["id"].tolist() == list(range(len(frame)))
    assert frame["column"][0] == "I1"
    assert frame["value"].isna().sum() == 39
    assert set(frame["column"][39:]) <= {f"C{i}" for i in range(1, 27)}
    assert run(checkpoint, "export", path, "--out", out) == 2  # it is there already


def test_export_with_slots_has_all_that_training_goes_on_with(saved, tmp_path):
    path, _ = saved
    assert run(checkpoint, "export", path, "--out", tmp_path / "out", "--slots") == 0
    found = Layers(folder.read_chain(path / folder.names_in(path)[-1])).manifest
    state = json.loads((tmp_path / "out/state.json").read_text())
    assert state["step"] == found.step > 0
    assert state["tables"].keys() == {table.name for table in found.tables}
    for table in found.tables:
        about = state["tables"][table.name]
        assert (about["step"], about["optimizer"], about["slots"]) == (table.step, table.optimizer, table.slots)
        assert about["hyperparameters"] == table.hyperparameters
    optimizer = torch.load(tmp_path / "out/optimizer.pt", weights_only=True)
    dense = torch.load(tmp_path / "out/dense.pt", weights_only=True)
    assert len(optimizer["state"]) == len(dense)
    assert optimizer["state"][0]["step"] == found.step
    assert not (tmp_path / "out/extra.pt").exists()
    assert run(checkpoint, "export", path, "--out", tmp_path / "plain") == 0
    assert not any((tmp_path / "plain" / name).exists() for name in ("state.json", "optimizer.pt"))


def test_export_with_slots_has_what_extra_holds(tmp_path):
    import hostdev

    table = hostdev.HostTable(9, 2, hostdev.LazyAdam(), name="t")
    runtime = hostdev.Runtime({"x": table}, depth=0)
    for _, rows in runtime.train([np.arange(4)] * 3, ids=lambda batch: {"x": batch}):
        rows["x"].sum().backward()
    extra = {"step": 3, "w": torch.ones(2), "n": np.arange(3), ("a", 1): [1.5, None, (2, "x")]}
    runtime.save(tmp_path / "checkpoints", extra=extra)
    runtime.close() if hasattr(runtime, "close") else None
    assert run(checkpoint, "export", tmp_path / "checkpoints", "--out", tmp_path / "out", "--slots") == 0
    state = json.loads((tmp_path / "out/state.json").read_text())
    assert (state["step"], state["tables"]["t"]["step"]) == (3, 3)
    found = torch.load(tmp_path / "out/extra.pt", weights_only=True)
    assert found.keys() == extra.keys()
    assert found["n"].tolist() == [0, 1, 2]
    assert torch.equal(found["w"], extra["w"])
    assert (found["step"], found["a", 1]) == (3, [1.5, None, (2, "x")])


def test_export_in_bfloat16(saved, tmp_path, capsys):
    path, _ = saved
    options = ["export", path, "--out", tmp_path / "out", "--dtype", "bfloat16"]
    assert run(checkpoint, *options) == 2
    assert "parquet has no bfloat16; use --format safetensors" in capsys.readouterr().err
    assert run(checkpoint, *options, "--format", "safetensors") == 0
    layers = Layers(folder.read_chain(path / folder.names_in(path)[-1]))
    for table in layers.manifest.tables:
        expected = torch.from_numpy(np.concatenate(list(layers.column(table.name, "weights")))).bfloat16()
        found = load_file(tmp_path / "out" / f"{table.name}.safetensors")
        assert found.keys() == {"weights"}
        assert torch.equal(found["weights"], expected)


def test_a_plain_model_of_what_was_exported(runs, tmp_path):
    """Compute Wide & Deep by hand, with tables from .npy and layers from torch's file; logits equal the predictor's."""
    import hostdev
    from hostdev.data import manifest as data
    from hostdev.data.shards import ShardReader

    path = runs / "wide/checkpoints"
    assert run(checkpoint, "export", path, "--out", tmp_path / "out", "--format", "npy") == 0
    wide, deep = (np.load(tmp_path / "out" / f"{name}.weights.npy") for name in ("wide", "deep"))
    dense = torch.load(tmp_path / "out/dense.pt", weights_only=True)
    found = data.read(runs / "data")
    batch = next(ShardReader(runs / "data", found, "test").batches(50))
    ids = np.hstack([np.tile(np.arange(13), (50, 1)), batch.ids])
    values = torch.from_numpy(np.hstack([batch.dense, np.ones((50, 26), np.float32)]))
    hidden = (torch.from_numpy(deep[ids]) * values[:, :, None]).flatten(1)
    numbers = sorted({int(name.split(".")[1]) for name in dense if name.startswith("deep.")})
    for number in numbers:
        hidden = torch.nn.functional.linear(hidden, dense[f"deep.{number}.weight"], dense[f"deep.{number}.bias"])
        hidden = hidden.relu() if number != numbers[-1] else hidden
    logits = (torch.from_numpy(wide[ids][:, :, 0]) * values).sum(1) + dense["bias"] + hidden[:, 0]
    np.testing.assert_allclose(hostdev.Predictor(path).logits(batch), logits, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "nowhere"], "nowhere does not exist"),
        (["info", "."], "has no checkpoint"),
        (["compact", ".", "--keep", 0], "--keep must be at least 1"),
        (["look", "."], "invalid choice: 'look'"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run(checkpoint, *arguments) == 2
    assert message in capsys.readouterr().err
