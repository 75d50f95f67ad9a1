"""What a run of millions of steps leaves: an ops.log of bounded size, and a summary that nothing after it can harm."""

import json
import os
import signal
from pathlib import Path

import pytest

from hostdev.cache import cache as cache_module
from hostdev.cache import optimum
from hostdev.cache.planner import Statistics
from hostdev.train import config, run
from tests.test_train import OPS_LINE, small, trained  # noqa: F401  (a fixture)

MIX = ("--host-device-mix", "--max-steps", 3)
CACHED = (*MIX, "--cache-rows", "10%")


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_ops_log_is_of_bounded_size(trained, small_data, tmp_path, capsys, monkeypatch):  # noqa: F811
    whole = [*small(small_data, *MIX), "--run-dir", "whole"]
    assert trained(*whole) == 0
    assert "ops_log" not in summary_of(tmp_path / "whole")
    size = len((tmp_path / "whole" / "ops.log").read_text())
    assert size > 2400
    capsys.readouterr()

    monkeypatch.setattr(config, "LEAST_OPS_LOG", 1)
    note = run.Run._note
    monkeypatch.setattr(run.Run, "_note", lambda self, *step: [self.log.flush(), note(self, *step)])
    assert trained(*small(small_data, *MIX, "--ops-log", "1200")) == 0
    out, err = capsys.readouterr()
    parts = [(tmp_path / "run" / f"ops.log{number}").read_text() for number in ("", ".1", ".2", ".3")]
    assert not (tmp_path / "run" / "ops.log.4").exists()
    assert all(OPS_LINE.match(line) for part in parts for line in part.splitlines())
    kept = sum(map(len, parts))
    assert kept <= 1200
    found = summary_of(tmp_path / "run")
    assert found["ops_log"]["limit_bytes"] == 1200
    assert kept + found["ops_log"]["dropped_bytes"] == pytest.approx(size, rel=0.1)  # but for the digits of times
    assert found["ops"].keys() == summary_of(tmp_path / "whole")["ops"].keys()
    assert found["state_sha256"] == summary_of(tmp_path / "whole")["state_sha256"]
    assert err == "the oldest lines of ops.log are removed from now on (--ops-log 1200)\n"
    assert "\n               ops.log is without its first " in out
    assert "--ops-log lets it have 1.2 KiB\n" in out


def test_no_ops_log(trained, small_data, tmp_path, capsys):  # noqa: F811
    assert trained(*small(small_data, *MIX, "--ops-log", 0)) == 0
    assert "files          run/: loss.log, eval.log, config.json, summary.json, curve.png\n" in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("ops*"))
    assert summary_of(tmp_path / "run")["ops"]["DenseForward"]["count"] == 3


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("much", "--ops-log: a size is a number and KiB, MiB, GiB or TiB, not 'much'"),
        ("1KiB", "--ops-log must be at least 64.0 KiB, or 0 for none, not 1KiB"),
    ],
)
def test_a_size_that_is_none(trained, small_data, capsys, size, message):  # noqa: F811
    assert trained(*small(small_data, *MIX, "--ops-log", size)) == 2
    assert capsys.readouterr().err == f"hostdev.train: error: {message}\n"


def finding(monkeypatch, do):
    """Let the search for the cache's optimum do something else, with a look at the summary before."""
    seen = []

    def optimal(*arguments, progress):
        seen.append(summary_of(Path("run")))
        do(progress)
        return Statistics()

    monkeypatch.setattr(cache_module, "optimal", optimal)
    return seen


def fail(progress):
    raise MemoryError


def signalled(number):
    def do(progress):
        progress()
        os.kill(os.getpid(), number)
        for _ in range(10**7):
            progress()

    return do


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (fail, "MemoryError"),
        (signalled(signal.SIGINT), "skipped, as somebody asked for the end"),
        (signalled(signal.SIGTERM), "skipped, as somebody asked for the end"),
    ],
)
def test_a_run_has_ended_well_before_its_caches_optimum(trained, small_data, tmp_path, capsys, monkeypatch, do, why):  # noqa: F811
    """The search may take long, or more memory than there is: what an hour has given is written first."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen = finding(monkeypatch, do)
    assert trained(*small(small_data, *CACHED)) == 0
    found = summary_of(tmp_path / "run")
    assert [each["status"] for each in (*seen, found)] == ["finished"] * 2
    assert len(found["state_sha256"]) == 64
    assert seen[0]["cache"]["no_optimum"] == "the process ended before it was found"
    assert (found["cache"]["optimal_hit_rate"], found["cache"]["optimal_batches"]) == (None, None)
    assert found["cache"]["no_optimum"] == why
    assert {**found, "cache": None} == {**seen[0], "cache": None}
    assert (
        f"{found['cache']['hit_rate']:.2%} of uses hit (no offline optimum: {why}); a step" in capsys.readouterr().out
    )
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_signal_ends_at_once(trained, small_data, tmp_path, capsys, monkeypatch):  # noqa: F811
    def twice(progress):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    seen = finding(monkeypatch, twice)
    assert trained(*small(small_data, *CACHED)) == 130
    assert summary_of(tmp_path / "run") == seen[0]
    assert seen[0]["status"] == "finished"


def test_a_full_disk_after_the_summary(trained, small_data, tmp_path, capsys, monkeypatch):  # noqa: F811
    def fill(progress):
        (tmp_path / "run" / ".summary.json.partial").symlink_to("/dev/full")

    seen = finding(monkeypatch, fill)
    monkeypatch.setattr(cache_module.bound, "least_cost", lambda *arguments, **options: 1.0)
    assert trained(*small(small_data, *CACHED)) == 0
    assert summary_of(tmp_path / "run") == seen[0]
    expected = "warning: the cache's offline optimum is not in summary.json: run: No space left on device\n"
    assert capsys.readouterr().err == expected


def test_another_rank_that_fails_then_changes_no_summary(trained, small_data, tmp_path, monkeypatch):  # noqa: F811
    runs, finish = [], run.Run.finish
    monkeypatch.setattr(run.Run, "finish", lambda self, *arguments: [runs.append(self), finish(self, *arguments)][1])
    seen = finding(monkeypatch, lambda progress: runs[0].abandon("failed"))
    monkeypatch.setattr(cache_module.bound, "least_cost", lambda *arguments, **options: 1.0)
    assert trained(*small(small_data, *CACHED)) == 0
    found = summary_of(tmp_path / "run")
    assert (found["status"], found["state_sha256"]) == ("finished", seen[0]["state_sha256"])


def test_no_optimum_where_memory_is_short(trained, small_data, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(optimum, "available_bytes", lambda: 1000)
    assert trained(*small(small_data, *CACHED)) == 0
    found = summary_of(tmp_path / "run")["cache"]
    assert (found["optimal_hit_rate"], found["no_optimum"]) == (None, "too little free memory")
    assert " of uses hit (no offline optimum: too little free memory); a step admits" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.json",
        "curve.png",
        "eval.log",
        "loss.log",
        "ops.log",
        "summary.json",
    ]
