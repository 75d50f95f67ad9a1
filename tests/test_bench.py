"""The benchmarks' registry: every script is in it, with a claim of one line, and `make bench` needs no other list."""

import json
import subprocess
import sys

import pytest

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
