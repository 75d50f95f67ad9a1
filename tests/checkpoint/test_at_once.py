"""Two processes that write the same files: the second is rejected before it opens or removes anything."""

import json
import shutil
import threading

import pytest

from hostdev.checkpoint import folder, remote
from hostdev.core import cli, outputs, pictures
from hostdev.core.errors import UserError
from hostdev.data.preprocess.build import Options
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.checkpoints import compact
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import command as training
from hostdev.train.rundir import RunDir
from tests.checkpoint.runs import MIX, small


def run(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def run_dir(small_data, tmp_path_factory):
    """A run that took 3 steps, and saved each."""
    from hostdev.ext.training import cli as train

    path = tmp_path_factory.mktemp("runs") / "run"
    options = [*MIX, "--checkpoint-every", 1, "--max-steps", 3, "--keep-checkpoints", 9]
    assert run(train, *small(small_data, path, *options)) == 0
    return path


def _files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_directory_has_one_run(trained, run_dir, small_data, tmp_path, saves):
    """Once, --resume admitted both: the first one's logs were removed, or had every line twice."""
    path = tmp_path / "run"
    shutil.copytree(run_dir, path)
    options = ["--checkpoint-every", 1] if saves else []
    if not saves:
        shutil.rmtree(path / "checkpoints")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config))
        (path / "summary.json").unlink()
    first = RunDir(path, again=True)
    before = _files(path)
    code, _, err = trained(*small(small_data, path, *MIX, *options, "--max-steps", 6, "--resume"))
    assert (code, err) == (
        2,
        f"hostdev.train: error: --run-dir {path} is in use: another process trains there; wait for that process, or "
        "end it\n",
    )
    assert _files(path) == before
    first.close()
    assert trained(*small(small_data, path, *MIX, *options, "--max-steps", 6, "--resume"))[0] == 0
    steps = [line.split(",")[0] for line in (path / "loss.log").read_text().splitlines()]
    assert len(steps) == len(set(steps)) == 6


def test_a_new_run_directory_has_one_run(tmp_path):
    first = RunDir(tmp_path / "run")
    for again in (True, False):
        with pytest.raises(UserError, match="already holds a run|is in use"):
            RunDir(tmp_path / "run", again=again)
    first.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_folder_has_one_run(trained, run_dir, small_data, tmp_path):
    shutil.copytree(run_dir / "checkpoints", tmp_path / "c")
    before = _files(tmp_path / "c")
    options = [*MIX, "--checkpoint-every", 1, "--checkpoint-dir", tmp_path / "c", "--max-steps", 5, "--resume"]
    with folder.locked(tmp_path / "c"):
        code, _, err = trained(*small(small_data, tmp_path / "second", *options))
    assert code == 2
    assert "is in use: another process writes checkpoints there" in err
    assert _files(tmp_path / "c") == before
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("command", ["predict", "export"])
def test_an_out_has_one_command(run_dir, small_data, tmp_path, capsys, command):
    """Once, both wrote to one hidden file: the first reported success with the other's rows."""
    out = tmp_path / ("p.parquet" if command == "predict" else "e")
    if command == "predict":
        call = predict, "--checkpoint", run_dir, "--data", small_data, "--out", out
    else:
        call = checkpoint, "export", run_dir, "--out", out
    with (outputs.new_file if command == "predict" else outputs.new_folder)(out) as partial:
        assert run(*call) == 2
        assert f"--out {out} is being written by another process; wait for it" in capsys.readouterr().err
        (partial / "x" if partial.is_dir() else partial).write_text("first")
    assert (out / "x" if out.is_dir() else out).read_text() == "first"
    assert run(*call) == 2
    assert "exists" in capsys.readouterr().err


def test_checkpoints_are_compacted_once(run_dir, tmp_path):
    shutil.copytree(run_dir / "checkpoints", tmp_path / "c")
    chain = remote.newest(tmp_path / "c").chain
    assert len(chain) > 1
    compact.compact(chain)
    with pytest.raises(UserError, match="was merged or removed by another process; run the command again"):
        compact.compact(chain)


@pytest.mark.parametrize("command", [["merge"], ["reshard", "--ranks", 2]])
def test_checkpoints_are_merged_once(run_dir, tmp_path, capsys, monkeypatch, command):
    """Once, both found the folder empty, and wrote a checkpoint each."""
    locked = folder.locked

    def meanwhile(path):
        if not folder.names_in(path):
            shutil.copytree(run_dir / "checkpoints" / "step-0000000001", path / "step-0000000001")
        return locked(path)

    monkeypatch.setattr(folder, "locked", meanwhile)
    assert run(checkpoint, *command[:1], run_dir, *command[1:], "--out", tmp_path / "out") == 2
    assert "already has checkpoints" in capsys.readouterr().err
    assert folder.names_in(tmp_path / "out") == ["step-0000000001"]


def test_a_picture_is_not_overwritten(tmp_path):
    made = pictures.figure(1, 1)
    for suffix in ("png", "pdf", "svg"):
        out = tmp_path / f"a.{suffix}"
        pictures.require_new(out)
        out.write_text("another's")
        with pytest.raises(UserError, match=f"--out {out} exists"):
            pictures.save(made, out)
        assert out.read_text() == "another's"
        pictures.save(made, tmp_path / f"b.{suffix}")
        assert (tmp_path / f"b.{suffix}").stat().st_size > 100


def test_two_quickstarts_make_one_data_set(tmp_path):
    text, found, failed = tmp_path / "rows.tsv", [], []

    def make():
        try:
            try:
                write_text(Synthetic(2000, 1), text, wait=True)
            except UserError:
                assert text.exists()
            found.append(training.prepare(text, tmp_path, Options(threshold=2)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert found[0] == found[1]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["rows.tsv", found[0].name])
