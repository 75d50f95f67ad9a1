"""Worker processes on this machine: --scheduler local:N."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from tests import forks
from tests.conftest import ROOT
from tests.data.preprocess.clusters import files_of, kill, wait_for


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Criteo text in several files, so that there are several pieces."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(6):
        write_text(Synthetic(1500, number), folder / f"day_{number}.tsv")
    return folder


@pytest.fixture(scope="module")
def expected(texts):
    out = texts.parent / "straight"
    build(CriteoText([texts]), out, Options(threshold=1, seed=2020))
    return files_of(out)


def start(texts, out, workers):
    command = [sys.executable, "-m", "hostdev.data.preprocess", "criteo", texts, "--out", out, "--threshold", "1"]
    return forks.Popen(
        [*map(str, command), "--scheduler", f"local:{workers}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def scratch():
    return set(Path(tempfile.gettempdir()).glob("hostdev-dask-*"))


@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_the_bytes_are_those_of_one_machine(texts, tmp_path, expected, workers):
    before = scratch()
    process = start(texts, tmp_path / "out", workers)
    said, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    assert "training" in said
    assert files_of(tmp_path / "out") == expected
    assert scratch() <= before


def test_ctrl_c_ends_all_processes_and_keeps_the_work(texts, tmp_path, expected):
    """The terminal sends it to the workers, too."""
    before = scratch()
    process = start(texts, tmp_path / "out", 2)
    try:
        wait_for(lambda: list(tmp_path.glob(".out.partial/pieces/*/pieces/*.arrow")), process)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        kill(process)
    assert process.returncode == 130
    *kept, last = error.splitlines()
    assert last == "hostdev.data.preprocess: interrupted"
    assert all("finished work is kept" in line for line in kept)
    assert scratch() <= before
    process = start(texts, tmp_path / "out", 1)
    _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    assert files_of(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--scheduler", "local:0"], "--scheduler local:0: the number of workers must be from 1 to 1,024"),
        (
            ["--scheduler", "host:1"],
            "--scheduler host:1: give the address of Dask's scheduler, such as tcp://HOST:8786",
        ),
        (["--scheduler", "local:2", "--threads", "2"], "--threads has no effect with --scheduler"),
    ],
)
def test_wrong_flags(in_process, flags, said):
    code, _, error = in_process(preprocess, "synthetic", "--rows", "9", "--out", "out", *flags)
    assert code == 2
    assert said in error
    assert error.count("\n") == 1


def test_what_only_this_machine_can_read(in_process):
    code, _, error = in_process(
        preprocess, "query", "SELECT 1", "--out", "out", "--label", "y", "--categorical", "c", "--scheduler", "local:1"
    )
    assert code == 2
    assert "--scheduler cannot divide a query among workers" in error
    code, _, error = in_process(preprocess, "synthetic", "--rows", "9", "--tsv", "t", "--scheduler", "local:1")
    assert code == 2
    assert "--scheduler has no effect with --tsv" in error


def test_standard_input(tmp_path):
    command = [sys.executable, "-m", "hostdev.data.preprocess", "criteo", "-", "--out", tmp_path / "out"]
    done = forks.run(
        [*map(str, command), "--scheduler", "local:1"],
        input="x",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "standard input, pipes and queries can be read only on this machine" in done.stderr
