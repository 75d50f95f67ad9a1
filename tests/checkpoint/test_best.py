"""With --early-stop, the best checkpoint is kept besides the newest, and predictions use it."""

import re
import shutil

import numpy as np
import pytest

import hostdev
from hostdev.checkpoint import folder, remote
from hostdev.core import cli
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.checkpoints import best
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from tests.data import movies


def run(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


def options(path, run_dir, *more):
    base = ["--data", path / "data", "--batch-size", 300, "--device", "cpu", "--model", "deepfm", "--table-lr", 0.1]
    return [*base, "--lr", 0.02, "--epochs", 12, "--keep-checkpoints", 1, "--run-dir", run_dir, *more]


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory):
    """A run whose AUC falls after an early epoch, with checkpoints at steps within epochs."""
    path = tmp_path_factory.mktemp("films")
    movies.make(rows=2000, users=60, items=40).write_csv(path / "films.csv")
    flags = ["--label", "liked", "--numeric", "age", "--categorical", "user,item", "--out", path / "data"]
    assert run(preprocess, "table", path / "films.csv", *flags) == 0
    more = ["--early-stop", 2, "--checkpoint-every", 4]
    assert run(train, *options(path, path / "run", *more)) == 0
    return path


def evaluations(run_dir):
    """Return the AUC and the log loss of each epoch."""
    lines = (run_dir / "eval.log").read_text().splitlines()
    return [tuple(float(re.search(f"{name} is ([0-9.]+)", line)[1]) for name in ("auc", "logloss")) for line in lines]


def test_it_is_kept_and_taken(overfitted, tmp_path, capsys):
    found = evaluations(overfitted / "run")
    number = int(np.argmax([auc for auc, _ in found]))
    assert number == len(found) - 3  # two epochs without a better one
    checkpoints = overfitted / "run/checkpoints"
    names = folder.names_in(checkpoints)
    newest = remote.newest(checkpoints).chain[-1]
    known = best.of_run(newest)
    assert known == best.Best(6 * (number + 1), number + 1, "AUC", pytest.approx(found[number][0], abs=1e-6), True)
    chains = [folder.read_chain(checkpoints / name) for name in names]
    assert {known.step, newest.manifest.step} <= {chain[-1].manifest.step for chain in chains}

    capsys.readouterr()
    for which, epoch in ((), number), (("--which", "newest"), -1), (("--which", "best"), number):
        out = tmp_path / f"{epoch}{len(which)}{which[-1:]}.parquet"
        arguments = ["--checkpoint", overfitted / "run", "--data", overfitted / "data", "--out", out, *which]
        assert run(predict, *arguments) == 0
        printed = capsys.readouterr().out
        assert f"AUC {found[epoch][0]:.4f}   log loss {found[epoch][1]:.4f}" in printed
        assert ("(the best: AUC" if epoch >= 0 else "(the newest, as requested)") in printed
    predictor = hostdev.Predictor(overfitted / "run")
    assert predictor.path == best.find_best_chain(checkpoints, known)[-1].path
    assert predictor.why == f"the best: AUC {found[number][0]:.4f} after epoch {number + 1}"
    assert hostdev.Predictor(overfitted / "run", which="newest").path == newest.path
    assert hostdev.Predictor(newest.path).path == newest.path
    with pytest.raises(hostdev.UserError, match="is a single checkpoint; name its parent folder"):
        hostdev.Predictor(newest.path, which="best")
    with pytest.raises(hostdev.UserError, match="there is no 'oldest' checkpoint; use best or newest"):
        hostdev.Predictor(overfitted / "run", which="oldest")


def test_it_survives_copies_merges_and_a_resumed_run(overfitted, tmp_path, capsys):
    shutil.copytree(overfitted / "run", tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    path = hostdev.Predictor(checkpoints).path
    assert run(checkpoint, "compact", checkpoints, "--keep", 1) == 0
    assert hostdev.Predictor(checkpoints).path == path
    newest = remote.newest(checkpoints).chain[-1]
    more = ["--early-stop", 4, "--checkpoint-every", 4, "--resume"]
    assert run(train, *options(overfitted, tmp_path / "run", *more)) == 0
    assert f"{newest.path}, after step {newest.manifest.step}" in capsys.readouterr().out
    again = remote.newest(checkpoints).chain[-1]
    assert again.manifest.step > newest.manifest.step
    known = best.of_run(again)
    assert hostdev.Predictor(checkpoints).path == best.find_best_chain(checkpoints, known)[-1].path


def test_without_early_stop_the_newest_is_taken(overfitted, tmp_path):
    assert run(train, *options(overfitted, tmp_path / "run", "--checkpoint-every", 5, "--epochs", 6)) == 0
    newest = remote.newest(tmp_path / "run/checkpoints").chain[-1]
    assert hostdev.Predictor(tmp_path / "run").path == newest.path
    known = best.of_run(newest)
    assert known.step < newest.manifest.step
    with pytest.raises(hostdev.UserError, match="only runs with --early-stop keep the best; use the newest"):
        hostdev.Predictor(tmp_path / "run", which="best")
    with pytest.raises(hostdev.UserError, match="there is no"):
        hostdev.Predictor(tmp_path / "nowhere", which="best")
