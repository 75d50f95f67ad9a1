"""What a run of millions of steps leaves: an ops.log of bounded size, and a summary that stays as it was written."""

import json

import pytest

from hostdev.train import ending, options, session
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

    monkeypatch.setattr(options, "LEAST_OPS_LOG", 1)
    record = session.Session._record
    flush_and_record = lambda self, *step: [self.logs.ops.flush(), record(self, *step)]  # noqa: E731
    monkeypatch.setattr(session.Session, "_record", flush_and_record)
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
    assert "\n               ops.log lacks its first " in out
    assert "--ops-log limits it to 1.2 KiB\n" in out


def test_no_ops_log(trained, small_data, tmp_path, capsys):  # noqa: F811
    assert trained(*small(small_data, *MIX, "--ops-log", 0)) == 0
    assert (
        "files          run/: loss.log, eval.log, scores.jsonl, config.json, summary.json, curve.png\n"
        in capsys.readouterr().out
    )
    assert not list((tmp_path / "run").glob("ops*"))
    assert summary_of(tmp_path / "run")["ops"]["DenseForward"]["count"] == 3


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("much", "--ops-log: a size must be a number of bytes, or a number with KiB, MiB, GiB or TiB, not 'much'"),
        ("1KiB", "--ops-log must be at least 64.0 KiB, or 0 for no ops.log, not 1KiB"),
    ],
)
def test_a_size_that_is_none(trained, small_data, capsys, size, message):  # noqa: F811
    assert trained(*small(small_data, *MIX, "--ops-log", size)) == 2
    assert capsys.readouterr().err == f"hostdev.train: error: {message}\n"


def test_another_rank_that_fails_then_changes_no_summary(trained, small_data, tmp_path, monkeypatch):  # noqa: F811
    finish = ending.Ending.finish
    seen = []

    def finish_and_fail(self, *arguments):
        found = finish(self, *arguments)
        seen.append(summary_of(tmp_path / "run"))
        self.abandon("failed")
        return found

    monkeypatch.setattr(ending.Ending, "finish", finish_and_fail)
    assert trained(*small(small_data, *CACHED)) == 0
    found = summary_of(tmp_path / "run")
    assert found == seen[0]
    assert (found["status"], len(found["state_sha256"])) == ("finished", 64)


def test_a_run_reports_bytes_and_hits_and_no_optimum(trained, small_data, tmp_path, capsys):  # noqa: F811
    """The optimum, and the least that any cache could cost, are found by `advise`."""
    assert trained(*small(small_data, *CACHED)) == 0
    found = summary_of(tmp_path / "run")["cache"]
    assert list(found) == [
        "rows",
        "policy",
        "window",
        "batches",
        "hit_rate",
        "unique_hit_rate",
        "admitted",
        "evicted",
        "bypassed",
        "bytes_to_device",
        "bytes_to_host",
        "host_us_saved",
    ]
    assert f"{found['hit_rate']:.2%} of lookups hit; a step admits" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.json",
        "curve.png",
        "eval.log",
        "loss.log",
        "ops.log",
        "scores.jsonl",
        "summary.json",
    ]
