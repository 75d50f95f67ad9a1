"""The benchmarks' registry: every script is in it, with a claim of one line, and `make bench` needs no other list."""

import json
import subprocess
import sys

import pytest

from bench import figures
from bench.record import RESULTS
from bench.registry import BENCHES, HERE
from tests.conftest import ROOT


def test_every_benchmark_is_registered_once():
    modules = [bench.module for bench in BENCHES.values()]
    assert len(set(modules)) == len(modules)
    assert {path.stem for path in HERE.glob("bench_*.py")} <= set(modules)
    for name, bench in BENCHES.items():
        assert len(bench.claim) > 20, name
        assert bench.claim.endswith("."), (name, "the claim goes over the end of the docstring's first line")


def test_the_list_and_a_misspelt_name():
    command = [sys.executable, "-m", "bench"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout and bench.claim in done.stdout for name, bench in BENCHES.items())
    done = subprocess.run([*command, "pipelin"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pipeline" in done.stderr


def test_the_page_of_figures_is_made_from_the_recorded_runs():
    """`python -m bench figures` writes both; an edit by hand, or a new record without it, fails here."""
    assert figures.PAGE.read_text() == figures.make_page()
    assert figures.CHART.read_text() == figures.make_chart()


def test_each_benchmark_has_one_recorded_run():
    names = [path.stem[11:] for path in RESULTS.glob("*.json")]
    assert sorted(names) == sorted(set(names)), "delete the older run from bench/results"


def test_a_newer_run_replaces_its_figures(tmp_path):
    run = json.loads(next(RESULTS.glob("*-stores.json")).read_text())
    (tmp_path / "2026-11-28-stores.json").write_text(json.dumps(run))
    (tmp_path / "2027-01-01-stores.json").write_text(json.dumps({**run, "date": "2027-01-01", "ratio": 0.5}))
    (tmp_path / "2026-11-22-loop.json").write_text(json.dumps({"date": "2026-11-22"}))
    page = figures.make_page(tmp_path)
    assert "local folder | 0.50 |" in page
    assert run["date"] not in page.replace(figures.HEAD, "")
    assert "0.1.0: `loop`" in page
    assert "RocksDB" not in page


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, bench in BENCHES.items() if bench.regular])
def test_a_regular_benchmark_still_runs(tmp_path, name):
    """`loop` was broken for a while: nothing else uses the parts of the runtime that it is made of."""
    command = [sys.executable, "-m", "bench", name, *BENCHES[name].trial, "--out", str(tmp_path / "result.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_benchmark_of_hosts_still_runs(tmp_path):
    """It is not regular, because it needs root; without what it needs, it says so in one line."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "bench", "hosts", *BENCHES["hosts"].trial, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode:
        assert done.stderr.startswith("bench hosts"), done.stderr
        pytest.skip(
            done.stderr.strip()
        )  # network namespaces need root and Linux's ip; the message says what is missing
    rows = json.loads(out.read_text())["training"]
    assert {row["levels"] for row in rows} == {1, 2}
    assert all(0 < row["network_bytes"] < row["link_bytes"] for row in rows)
