"""`hostdev report`: what it reads from run directories, of any state, and what it refuses."""

import fcntl
import importlib.util
import json
import re
import shutil

import numpy as np
import pytest

from hostdev.core.run_files import eval_line, loss_line, read_evaluations, read_losses
from hostdev.data.schema import SINGLE_LABEL, Targets
from hostdev.ext.report import cli as report
from hostdev.ext.report.charts import shorten
from hostdev.ext.report.command import make
from hostdev.ext.report.reading import calibrate, distribution, newest
from hostdev.train.scores import ScoreCounts
from tests.report.runs import CONFIG, SUMMARY, scores, write_files, write_run


def text_of(page):
    """Return a page's text without scripts and tags, with single blanks."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", page).replace("&#39;", "'").split())


def specs_of(page):
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_of_one_run(in_process, tmp_path):
    write_run(tmp_path / "run")
    code, out, error = in_process(report, "run", "--out", "page.html")
    assert (code, error) == (None, "") or (code, error) == (0, "")
    assert re.fullmatch(r"page.html: a report of 1 run, \d\.\d MB\n", out)
    page = (tmp_path / "page.html").read_text()
    shown = text_of(page)
    for wanted in (
        *("AUC 0.7200", "log loss 0.5000", "samples/s 1,234", "peak memory 3.0 GiB", "status finished"),
        *("Overlap efficiency 0.80", "90.0% of lookups hit", "2 processes on one host", "12,345", "clicked"),
        *("DenseForward takes 98.4% of the time of all ops", "Best: 0.7100 after epoch 2 of 2", "2 saved in"),
    ):
        assert wanted in shown, wanted
    assert len(specs_of(page)) == 10
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert len(titles) == len(set(titles))


def test_the_page_asks_for_nothing_from_a_network(tmp_path):
    page = make([write_run(tmp_path / "run")])
    assert "default-src 'none'" in page and "unsafe-eval" not in page.split("</head>")[0]
    tags = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert set(re.findall(r"""(?:src|href)="([^"#]*)""", tags)) <= {"data:,", ""}
    assert page.count("</script>") == 3


def test_runs_side_by_side(tmp_path):
    other = {**CONFIG, "model": "dcn", "lr": 0.1, "run_dir": "b"}
    one = write_run(tmp_path / "a")
    two = write_run(tmp_path / "b", seed=1, config=other, summary={**SUMMARY, "auc": 0.9, "ranks": {}, "cache": {}})
    page = make([one, two])
    shown = text_of(page)
    assert "0.9000 ★" in shown and "0.7200 ★" not in shown
    assert "≠ --model wide_deep dcn" in shown and "≠ --lr - 0.1" in shown and "≠ --run-dir" not in shown
    assert page.count('<tr class="marked">') == 2 and "2 of 10 entries differ" in shown
    assert "b: no embedding cache was used." in shown and "b: one process trained" in shown
    for spec in specs_of(page):
        for layer in spec.get("layer", [spec]):
            if "color" in layer.get("encoding", {}):  # a run has the same colour in each chart
                assert layer["encoding"]["color"]["scale"] == {
                    "domain": ["a", "b"],
                    "range": ["var(--run0)", "var(--run1)"],
                }


@pytest.mark.parametrize("removed", ["loss.log", "eval.log", "scores.jsonl", "config.json", "summary.json"])
def test_files_that_are_missing_or_broken(removed, tmp_path):
    run = write_run(tmp_path / "run")
    for content in (b"", b"\x00\xff{", b"[1, 2]", b'{"a": NaN', b'{"status": {}, "ops": 3, "auc": "x", "ranks": [1]}'):
        (run / removed).write_bytes(content)
        make([run])
    (run / removed).unlink()
    make([run])
    (run / removed).mkdir()
    assert f"run: {removed} cannot be read" in text_of(make([run]))


def replace_leaves(content, value):
    """Yield copies of JSON content with each value, in turn, replaced."""
    yield value
    keys = [*content] if isinstance(content, dict) else range(min(2, len(content))) if isinstance(content, list) else ()
    for key in keys:
        for other in replace_leaves(content[key], value):
            copy = content.copy()
            copy[key] = other
            yield copy


@pytest.mark.parametrize("file", ["config.json", "summary.json", "scores.jsonl", "files.jsonl", "rank1/summary.json"])
def test_numbers_that_are_damaged(file, tmp_path):
    """An integer of 400 digits anywhere is a damaged file, which is named; other odd values are left out."""
    run = write_files(write_run(tmp_path / "run"), 2)
    (run / "rank1").mkdir()
    shutil.copy(run / "summary.json", run / "rank1")
    *lines, last = (run / file).read_text().splitlines(keepends=True)
    texts = ["1" * 400, "Infinity", "-1e308", '"\\ud800"', "true"]
    for number, content in enumerate(replace_leaves(json.loads(last), "@")):
        text = texts[number % len(texts)]
        (run / file).write_text("".join(lines) + json.dumps(content).replace('"@"', text) + "\n")
        page = make([run])
        if text == texts[0] and file.endswith(".json"):
            assert f"run: {file} cannot be read: a number has more than 64 bits" in text_of(page)
        elif text == texts[0]:
            told = f"run: {file}, line {len(lines) + 1}: a number has more than 64 bits; damaged lines, which are left"
            assert f"{told} out: 1" in text_of(page)


def test_a_run_that_trains_and_one_that_was_killed(tmp_path):
    run = write_run(tmp_path / "run", summary=None)
    ops = "2026-11-28 19:45:45.900 INFO cpu kernel: Default/deep/EmbeddingLookup-op2 costs 290 us.\n"
    unique, other = ops.replace("deep/EmbeddingLookup", "Unique"), ops.replace("deep/", "wide/")
    (run / "ops.log").write_text(unique + ops * 2 + other + unique + ops[:-9])
    with (run / "loss.log").open("a") as file:
        file.write("epoch: 3 step: 1, wide_lo")  # a line that is being written
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        shown = text_of(make([run]))
    assert "status running" in shown and "steps 40" in shown
    assert "the last 5 calls in ops.log" in shown and "10 others" not in shown
    rows = (
        "Unique 2 290.0 - 0.00 40.0%",
        "EmbeddingLookup (deep) 2 290.0",
        "EmbeddingLookup (wide) 1 290.0 - 0.00 20.0%",
    )
    assert all(row in shown for row in rows), shown
    assert "the pipeline's overlap is known when the run has ended" in shown
    assert "status ended without a summary" in text_of(make([run]))


def test_a_resumed_run_does_not_show_its_earlier_summary(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "loss.log").open("a") as file:
        file.write(loss_line(3, 1, 0.5, 0.5))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "status running" in text_of(make([run]))
    assert "status finished" in text_of(make([run]))


def test_a_run_that_follows_a_folder(tmp_path):
    run = write_files(write_run(tmp_path / "run", config={**CONFIG, "follow": "in"}))
    for name in ("eval.log", "scores.jsonl"):
        (run / name).unlink()
    shown = text_of(make([run]))
    assert "30 files taken, 0 set aside; the last was day30.csv." in shown
    assert "AUC before training on a file" in shown and "keeps no counts of scores" in shown


def test_labels_that_are_numbers_and_several_labels(tmp_path):
    run = write_run(tmp_path / "run", summary={"status": "finished", "rmse": 0.5})
    (run / "eval.log").write_text(eval_line(1, 40, {"rmse": 0.5, "mae": 0.25, "rows": 9}, None))
    (run / "scores.jsonl").unlink()
    shown = text_of(make([run]))
    assert "RMSE 0.5000" in shown and "MAE by epoch" in shown and "Best: 0.2500 after epoch 1 of 1" in shown
    assert "its labels are numbers, which have no probability" in shown
    lines = [eval_line(n, 20 * n, {"rmse": 0.5, "mae": 0.25, "auc": 0.7, "rows": 9}, None) for n in (1, 2)]
    (run / "eval.log").write_text("".join(lines))  # the first is the best, as for `--which best`
    shown = text_of(make([run]))
    assert "Best: 0.2500 after epoch 1 of 2" in shown and "Best: 0.7000 after epoch 1 of 2" in shown
    labels = {"clicked": scores()["clicked"], "bought": scores(1)["clicked"], "none": []}
    (run / "scores.jsonl").write_text(json.dumps({"epoch": 1, "step": 40, "split": "test", "labels": labels}) + "\n")
    shown = text_of(make([run]))
    assert "Calibration of clicked" in shown and "Distribution of scores of bought" in shown
    assert "of none" not in shown


def test_names_and_options_are_untrusted(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    config = {**CONFIG, "data": evil, evil: evil, "preprocess": {evil: evil}}
    run = write_run(tmp_path / "<b>run&", config=config, summary={**SUMMARY, "status": evil})
    run = run.rename(tmp_path / "<b>r\udcff\n\x1b")
    page = make([run])
    assert page.count("<script") == 3 and "<img src=x" not in page and "<b>" not in page
    page.encode()
    assert "alert(1)" in text_of(page)


def test_100_000_steps(tmp_path):
    run = write_run(tmp_path / "run", steps=100_000, epochs=20)
    lines = (run / "loss.log").read_text().splitlines()
    lines[54_321] = loss_line(12, 1, 77.0, 77.0).strip()
    (run / "loss.log").write_text("\n".join(lines) + "\n")
    page = make([run])
    assert len(page.encode()) < 5_000_000
    values = specs_of(page)[0]["data"]["values"]
    assert len(values) <= 400 and max(value["high"] for value in values) == 77.0


def test_many_runs(tmp_path):
    page = make([write_run(tmp_path / f"run{number}", seed=number) for number in range(10)])
    assert "There are 10 runs and 8 colours; colours repeat." in text_of(page)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["nothing", "--out", "x.html"], "there is no run directory nothing"),
        (["file", "--out", "x.html"], "file is a file"),
        ([".", "--out", "x.html"], "did you mean run?"),
        (["empty", "--out", "x.html"], "empty is not a run directory"),
        (["run", "./run", "--out", "x.html"], "are the same run"),
        (["run", "--out", "file"], "exists and is not a report"),
        (["run", "--out", "empty"], "exists and is not a report"),
        (["run", "--out", "no/x.html"], "there is no folder no"),
        (["s3://bucket/run", "--out", "x.html"], "is an address; this must be a path of this machine"),
        (["run"], "--out"),
    ],
)
def test_what_is_refused(arguments, wanted, in_process, tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    code, _, error = in_process(report, *arguments)
    assert code == 2 and wanted in error and error.count("\n") <= 3
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "x.html").exists()


def test_a_report_replaces_a_report(in_process, tmp_path):
    write_run(tmp_path / "run")
    for _ in range(2):
        assert not in_process(report, "run", "--out", "x.html")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.html"]


def test_a_missing_package_is_named(in_process, tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    find = importlib.util.find_spec
    monkeypatch.setattr("hostdev.ext.report.cli.find_spec", lambda name: None if name == "vl_convert" else find(name))
    code, _, error = in_process(report, "run", "--out", "x.html")
    assert code == 2 and "vl-convert-python" in error and "pip install 'hostdev[report]'" in error


def test_lines_of_logs(tmp_path):
    path = tmp_path / "log"
    path.write_text(loss_line(1, 1, 0.5, 0.25) + "noise\n" + loss_line(2, 3, float("nan"), 1e9) + "epoch: 3 step: 1, w")
    np.testing.assert_array_equal(read_losses(path), [[1, 1, 0.5, 0.25], [2, 3, np.nan, 1e9]])
    path.write_text("")
    assert read_losses(path).shape == (0, 4)
    path.write_text(
        eval_line(1, 9, {"auc": 0.5, "rows": 3}, None)
        + eval_line(2, 18, {"rmse": 2.0, "rows": 3}, {"rmse": 1.0, "rows": 2})
    )
    first, second = read_evaluations(path)
    assert first == (1, 9, {"auc": 0.5}, {}) and second == (2, 18, {"rmse": 2.0}, {"rmse": 1.0})


def test_extremes_are_kept():
    values = np.random.default_rng(0).random(100_003)
    values[[7, 99_999]] = -5.0, 9.0
    values[50] = np.nan
    series = shorten(values)
    assert len(series.at) <= 400 and series.low.min() == -5.0 and series.high.max() == 9.0
    assert (series.low <= series.mean).all() and (series.mean <= series.high).all()
    assert (np.diff(series.at) > 0).all() and series.group == 251
    few = shorten(np.array([3.0, 1.0, 2.0]))
    assert few.at.tolist() == [1, 2, 3] and few.mean.tolist() == few.low.tolist() == [3, 1, 2]
    assert len(shorten(np.full(5, np.nan)).at) == len(shorten(np.empty(0)).at) == 0


def test_counts_of_scores():
    logits = np.array([-100, -0.05, 0.05, 0.05, 100, np.inf, np.nan], np.float32)
    labels = np.array([0, 0, 1, 0, 1, 1, 0], np.float32)
    counts = ScoreCounts(("a",), SINGLE_LABEL)
    counts.add(logits[:3], labels[:3])
    counts.add(logits[3:], labels[3:])
    assert counts.as_lists() == {"a": [[0, 1, 0, 0.0], [119, 1, 0, 0.487503], [120, 1, 1, 1.024995], [239, 0, 1, 1.0]]}
    targets = Targets(numeric=("price",))
    several = ScoreCounts(("a", "price"), targets)
    several.add(np.zeros((3, 2), np.float32), np.ones((3, 2), np.float32))
    assert several.as_lists() == {"a": [[120, 0, 3, 1.5]]}


def test_calibration_and_distribution():
    line = {"step": 1, "split": "test", "labels": scores(rows=100_000)}
    (found,) = newest([{"step": 0}, line, {"labels": {"x": [[999, 1, 1, 1]]}, "step": 2, "split": "test"}]).values()
    groups = calibrate(found)
    assert 10 <= len(groups) <= 15 and sum(group.samples for group in groups) == 100_000
    assert all(abs(group.predicted - group.observed) < group.high - group.low for group in groups)
    edges, negatives, positives = distribution(found)
    assert np.isclose(negatives.sum(), 1) and np.isclose(positives.sum(), 1)
    assert edges[np.argmax(negatives)] < edges[np.argmax(positives)]
    assert newest([]) == {} == newest([{**line, "labels": {"clicked": []}}])
