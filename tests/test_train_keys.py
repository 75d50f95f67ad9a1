"""Tables by key from the command line: raw ids, training, resuming, predictions, and what is refused."""

import json
import sys

import numpy as np
import pyarrow.csv
import pytest

import hostdev
from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.advice import cli as advise
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from hostdev.ext.training import starting
from hostdev.ext.verify import cli as verify
from tests import forks
from tests.conftest import digest_of
from tests.data import events

OPTIONS = ["--host-device-mix", "--tables", "dynamic", "--capacity", "20MiB", "--model", "deepfm", "--emb-dim", 4]
RULES = ["--admit-count", 2, "--evict-unused", 12, "--batch-size", 250, "--order", "stored", "--device", "cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a data set with raw ids of eight days of events, and the file with its last day."""
    folder = tmp_path_factory.mktemp("events")
    table = events.make(days=8, rows=1_000)
    pyarrow.csv.write_csv(table, folder / "events.csv")
    pyarrow.csv.write_csv(table.slice(7_000), folder / "last.csv")
    flags = ["--label", "clicked", "--numeric", "hour", "--categorical", "user,item,device"]
    options = [*flags, "--test-after", "day=6"]
    for name, ids in (("raw", ["--ids", "raw"]), ("vocabulary", ["--threshold", "0"])):
        arguments = ["table", folder / "events.csv", "--out", folder / name, *options, *ids]
        preprocess.main(list(map(str, arguments)))
    return folder


def test_raw_ids(data):
    found = manifest.read(data / "raw")
    assert found.vocabulary is None and found.id_type == "int64"
    assert cli.run(preprocess.PROG, preprocess.main, ["check", str(data / "raw")]) == 0
    assert cli.run(preprocess.PROG, preprocess.main, ["info", str(data / "raw"), "--out", str(data / "info.png")]) == 0


def test_by_two_processes_and_then_by_one(run, data, tmp_path):
    """Without --capacity, too: what is free for each of them is divided otherwise."""
    own = [each for each in OPTIONS if each not in ("--capacity", "20MiB")]
    every = ["--data", data / "raw", *own, *RULES, "--epochs", 1, "--micro-batches", 2]
    run(train, *every, "--run-dir", "whole")
    command = [
        sys.executable,
        "-m",
        "hostdev.train",
        *every,
        "--spawn",
        2,
        "--run-dir",
        "parts",
        "--checkpoint-every",
        6,
    ]
    done = forks.run(list(map(str, [*command, "--max-steps", 13])), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run(train, *every, "--run-dir", "parts", "--resume", "--checkpoint-every", 6)
    assert digest_of(tmp_path / "parts") == digest_of(tmp_path / "whole")
    for name in ("keys.log", "loss.log"):
        assert (tmp_path / "parts" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_killed_resumed_and_cached(run, data, tmp_path):
    every = ["--data", data / "raw", *OPTIONS, *RULES, "--epochs", 2]
    out = run(train, *every, "--run-dir", "whole")
    assert "up to" in out and "keys x 4 (LazyAdam)" in out
    shown = next(line for line in out.splitlines() if line.startswith("keys "))
    log = np.loadtxt(tmp_path / "whole" / "keys.log", np.int64, delimiter=",", skiprows=1)
    assert log[:, 0].tolist() == list(range(1, 57))
    assert (log[:, 1] == log[:, 3] - log[:, 4]).all() and log[-1, 4] > 0
    assert shown.split(None, 1)[1].startswith(f"{log[-1, 1]:,} have a row, {log[-1, 2]:,} wait for one")
    assert (tmp_path / "whole" / "keys.png").stat().st_size > 10_000
    run(train, *every, "--run-dir", "parts", "--checkpoint-every", 5, "--max-steps", 13)
    more = ["--cache-rows", "2%", "--pipeline-depth", 4, "--capacity", "30MiB"]
    out = run(train, *every, *more, "--run-dir", "parts", "--checkpoint-every", 5, "--resume")
    assert digest_of(tmp_path / "parts") == digest_of(tmp_path / "whole")
    assert (tmp_path / "parts" / "keys.log").read_text() == (tmp_path / "whole" / "keys.log").read_text()
    out = run(predict, "--checkpoint", "parts", "--data", data / "last.csv", "--out", "scores.parquet")
    shown = f"AUC {json.loads((tmp_path / 'parts' / 'summary.json').read_text())['auc']:.4f}"
    assert shown in out
    predictor = hostdev.Predictor(tmp_path / "parts")
    columns = {
        "hour": [5, 5],
        "user": ["u00001", "nobody"],
        "item": ["nothing", "i00700"],
        "device": ["phone", "phone"],
    }
    few = predictor(columns)
    assert np.isfinite(few).all() and few[0] != few[1]
    table = hostdev.open(tmp_path / "parts")["vectors"]
    assert len(table) == log[-1, 1]


def test_raw_ids_begin_with_the_rows_of_a_vocabulary(run, data, tmp_path):
    options = ["--host-device-mix", "--model", "deepfm", "--emb-dim", 4, "--batch-size", 250, "--device", "cpu"]
    run(train, "--data", data / "vocabulary", *options, "--epochs", 2, "--run-dir", "old", "--checkpoint-every", 10)
    every = ["--data", data / "raw", *options, "--tables", "dynamic", "--capacity", "20MiB", "--start-from", "old"]
    out = run(train, *every, "--epochs", 1, "--max-steps", 1, "--run-dir", "new", "--checkpoint-every", 1)
    old, new = (hostdev.open(tmp_path / name) for name in ("old", "new"))
    assert f"table vectors: {len(old['vectors']):,} rows with their slots" in out
    assert len(new["vectors"]) == len(old["vectors"]) - 3  # the out-of-vocabulary rows are not keys
    mapped = starting.map_ids(data / "vocabulary", manifest.read(data / "vocabulary"), manifest.read(data / "raw"))
    ids = np.flatnonzero(mapped.known)
    for name in ("vectors", "first_order"):
        same = (old[name].lookup(ids) == new[name].lookup(mapped.keys[ids])).all(1)
        assert 0.5 < same.mean() < 1  # the step has changed its own rows
    before, after = (json.loads((tmp_path / name / "summary.json").read_text())["auc"] for name in ("old", "new"))
    assert abs(before - after) < 0.02
    names = manifest.read(data / "raw").schema.ids
    for name in names:
        oov = old["vectors"].lookup([mapped.unknown[name]])
        assert np.abs(new["vectors"].lookup([-1], unknown=name) - oov).max() < 0.05
    run(train, *every, "--max-steps", 1, "--run-dir", "zeros", "--unknown-ids", "zeros", "--checkpoint-every", 1)
    assert not hostdev.open(tmp_path / "zeros")["vectors"].lookup([-1]).any()
    processes = [sys.executable, "-m", "hostdev.train", *every, "--epochs", 1, "--max-steps", 1, "--micro-batches", 2]
    done = forks.run(
        list(map(str, [*processes, "--spawn", 2, "--run-dir", "two"])), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run(train, *every, "--epochs", 1, "--max-steps", 1, "--micro-batches", 2, "--run-dir", "one")
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two")


@pytest.mark.parametrize("unknown", ["zeros", "initial"])
def test_what_ids_without_a_row_read(unknown, run, data, tmp_path):
    every = ["--data", data / "raw", *OPTIONS, *RULES, "--epochs", 1, "--unknown-ids", unknown]
    run(train, *every, "--run-dir", "one", "--checkpoint-every", 9)
    run(train, *every, "--run-dir", "two", "--checkpoint-every", 5, "--max-steps", 11)
    run(train, *every, "--run-dir", "two", "--checkpoint-every", 5, "--resume", "--cache-rows", "3%")
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two")
    auc = json.loads((tmp_path / "one" / "summary.json").read_text())["auc"]
    assert f"AUC {auc:.4f}" in run(predict, "--checkpoint", "one", "--data", data / "last.csv", "--out", "s.parquet")


def test_a_full_table_is_saved(run, in_process, data, tmp_path):
    """It is resumed with a larger capacity, and ends as if that had been known; also with two processes."""
    every = ["--data", data / "raw", *OPTIONS, "--batch-size", 250, "--epochs", 1, "--micro-batches", 2]
    run(train, *every, "--run-dir", "whole")
    command = [*every, "--capacity", 450, "--checkpoint-every", 50]
    code, _, error = in_process(train, *command, "--run-dir", "one")
    assert code == 2 and error.count("\n") == 1
    assert "its capacity is 450 rows;" in error and "continue with --resume" in error and "--capacity" in error
    two = [sys.executable, "-m", "hostdev.train", *command, "--spawn", 2, "--run-dir", "two"]
    done = forks.run(list(map(str, two)), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.strip() == error.strip().replace("one/", "two/")
    for name in ("one", "two"):
        run(train, *every, "--run-dir", name, "--resume", "--checkpoint-every", 50)
        assert digest_of(tmp_path / name) == digest_of(tmp_path / "whole")
    for given, sooner in (([], "--evict-unused"), (["--evict-unused", 9000], "a smaller --evict-unused")):
        code, _, error = in_process(train, *every, "--capacity", 450, *given, "--run-dir", f"unsaved{len(given)}")
        assert code == 2 and f"give a larger --capacity or --admit-count, or {sooner}\n" in error
    code, _, error = in_process(train, *every, "--capacity", 9, "--run-dir", "none")
    assert code == 2 and "give a larger --capacity, or a smaller --batch-size" in error
    assert not (tmp_path / "none").exists()


def test_a_run_starts_from_another(run, data, tmp_path):
    every = ["--data", data / "raw", *OPTIONS, *RULES, "--epochs", 1]
    run(train, *every, "--run-dir", "first", "--checkpoint-every", 10)
    out = run(train, *every, "--run-dir", "second", "--start-from", "first/checkpoints")
    assert "table vectors: " in out
    assert digest_of(tmp_path / "first") != digest_of(tmp_path / "second")


def test_every_mode_and_a_fault(in_process, run, data):
    every = ["--data", data / "raw", *OPTIONS[1:], *RULES[:4], "--batch-size", 500, "--steps", 10]
    assert "all modes agree in every bit of every step" in run(verify, *every, "--processes", 2)
    code, out, _ = in_process(verify, *every, "--inject-fault")
    assert code == 1 and "the injected fault was caught in every group of tables" in out


def test_ids_of_a_vocabulary_are_keys(run, data, tmp_path):
    """Without admission and eviction, a table by key learns what the table by row learns from the same first values."""
    every = ["--data", data / "vocabulary", *OPTIONS, *RULES[4:], "--epochs", 1]
    run(train, *every, "--run-dir", "key")
    assert json.loads((tmp_path / "key" / "summary.json").read_text())["keys"]["waiting"] == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "the data has raw ids (hostdev preprocess --ids raw), which need tables that grow: give --tables dynamic"),
        (["--admit-count", 2], "--admit-count has no effect without --tables dynamic; leave out --admit-count"),
        (["--tables", "dynamic"], "--tables dynamic needs --host-device-mix"),
        ([*OPTIONS, "--l2", "table"], "--l2 table"),
        ([*OPTIONS, "--admit-count", 0], "--admit-count must be in 1.."),
        ([*OPTIONS, "--evict-unused", 0], "--evict-unused must be at least 1 step, not 0"),
        ([*OPTIONS, "--capacity", "much"], "--capacity: a size must be a number of bytes"),
        ([*OPTIONS, "--capacity", "1"], "capacity"),
        ([*OPTIONS, "--capacity", "900TiB"], "keys take"),
        (
            [*OPTIONS, "--order", "stored", "--shuffle-window", 2],
            "--shuffle-window cannot be combined with --order stored",
        ),
        ([*OPTIONS, "--staleness", 1], "--staleness"),
    ],
    ids=str,
)
def test_what_is_refused(in_process, data, options, error):
    code, _, told = in_process(train, "--data", data / "raw", "--device", "cpu", "--batch-size", 250, *options)
    assert code == 2 and error in told and told.count("\n") == 1, told


def test_advice_about_admission(run, data):
    out = run(advise, "--data", data / "raw", "--model", "deepfm", "--emb-dim", 4)
    table = pyarrow.csv.read_csv(data / "events.csv")
    counts = [table.slice(0, 7_000)[name].value_counts().to_pylist() for name in ("user", "item", "device")]
    each = 4 * 3 + 45 + 4 * 4 * 3 + 45
    assert f"a key takes {each} bytes in all" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line[:1].isdigit()}
    for n in (1, 2, 10):
        kept = sum(one["counts"] >= n for column in counts for one in column)
        assert rows[str(n)][1] == f"{kept:,}"
    before = sum(min(one["counts"], 2) for column in counts for one in column)
    assert rows["3"][4] == f"{before / 21_000:.1%}"
    assert "\nadvice   " in out


def test_options_of_raw_ids_that_contradict(in_process, data):
    flags = ["--ids", "raw", "--threshold", 3]
    table = ["table", data / "events.csv", "--out", "x", "--label", "clicked", "--categorical", "user"]
    code, _, told = in_process(preprocess, *table, *flags)
    assert code == 2 and "--threshold has no effect with --ids raw" in told
    code, _, told = in_process(preprocess, *table, "--ids", "raw", "--hash-buckets", 5)
    assert code == 2 and "--hash-buckets has no effect with --ids raw" in told


@pytest.mark.parametrize("numeric", [[], ["--numeric", "hour"]], ids=["without numbers", "with numbers"])
def test_raw_ids_are_known_whatever_columns_there_are(in_process, run, data, tmp_path, numeric):
    table = ["table", data / "events.csv", "--label", "clicked", "--categorical", "user", *numeric]
    assert "raw ids" in run(preprocess, *table, "--ids", "raw", "--out", tmp_path / "raw")
    assert "admit-count" in run(advise, "--data", tmp_path / "raw", "--model", "deepfm", "--out", tmp_path / "a.png")
    options = ["--model", "deepfm", "--device", "cpu", "--batch-size", 250]
    code, _, told = in_process(train, "--data", tmp_path / "raw", *options)
    assert code == 2 and "give --tables dynamic" in told
