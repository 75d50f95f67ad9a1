"""`hostdev advise --disk`: a measured disk, simulated reads, and the least memory with which the disk keeps up."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.advice import cli as advise
from hostdev.ext.advice import disk as disk_advice
from hostdev.ext.advice.disk import DiskRates, Need, format_needs, measure_disk
from hostdev.ext.training import cli as train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a data set of 30,000 events of 9,000 users, a few of whom cause most events."""
    folder, random = tmp_path_factory.mktemp("events"), np.random.default_rng(0)
    users = np.where(random.random(30_000) < 0.6, random.integers(0, 300, 30_000), random.integers(0, 9_000, 30_000))
    table = pa.table({"clicked": random.integers(0, 2, 30_000), "user": users, "day": np.arange(30_000) // 5_000})
    pyarrow.csv.write_csv(table, folder / "events.csv")
    flags = ["--label", "clicked", "--categorical", "user", "--test-after", "day=4", "--threshold", "0"]
    preprocess.main(["table", str(folder / "events.csv"), "--out", str(folder / "data"), *flags])
    return folder / "data"


def test_the_disk_is_measured_and_left_clean(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_advice, "_SECONDS", 0.1)
    rates = measure_disk(tmp_path / "disk")
    assert rates.reads > 100 and rates.written > 1e5
    assert list((tmp_path / "disk").iterdir()) == []


def test_the_least_memory_with_which_the_disk_keeps_up_is_recommended():
    needs = [
        Need(0.1, 10 << 20, 1_000, 4e6, 1e6),
        Need(0.5, 50 << 20, 100, 4e5, 1e5),
        Need(0.75, 75 << 20, 9, 9e4, 9e3),
    ]
    rates = DiskRates(reads=10_000, written=1e8, direct=True)
    assert needs[0].seconds(rates) == pytest.approx(0.11)
    lines = format_needs(needs, rates, 0.02)
    assert lines[-1] == "advice   --table-memory 50.0MiB: the disk keeps up with the steps"
    assert [line.endswith("<- recommended") for line in lines[2:5]] == [False, True, False]
    assert lines[2].split()[-2:] == ["9.1", "0.79"]  # steps a second, and 1 MB a step as TB a day
    assert "the disk takes 2.0 times as long as a step" in format_needs(needs[:1], rates, 0.055)[-1]
    assert "do not fit" in format_needs([], rates, 1.0)[-1]


def test_the_advice_can_be_followed(run, data, tmp_path, monkeypatch):
    """Reads are those of a run with so much memory, which takes the recommended size as it is printed."""
    monkeypatch.setattr(disk_advice, "_SECONDS", 0.1)
    common = ["--data", data, "--model", "deepfm", "--emb-dim", 400, "--batch-size", 500]
    out = run(advise, *common, "--disk", tmp_path / "disk", "--step-ms", 1_000)
    memory = next(line for line in out.splitlines() if line.startswith("advice")).split()[2].rstrip(":")
    row = next(line for line in out.splitlines() if "<- recommended" in line).split()
    told = run(
        train, *common, "--host-device-mix", "--table-dir", tmp_path / "disk", "--table-memory", memory, "--epochs", 2
    )
    line = next(line for line in told.splitlines() if line.startswith("disk  ") and "a step read" in line)
    read = int(line.partition("a step read ")[2].split()[0].replace(",", ""))
    assert read < 2 * float(row[3].replace(",", ""))
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--emb-dim", 1, "--disk", "d"], "no table has rows of 64 bytes or more"),
        (["--step-ms", 5], "--step-ms has no effect without --disk"),
        (["--table-window", 5], "--table-window has no effect without --disk"),
        (["--disk", "d", "--table-window", -1], "--table-window must be in 0..1024 batches, not -1"),
        (["--disk", "d", "--step-ms", "nan"], "--step-ms must be a number above 0 milliseconds, not nan"),
        (["--disk", "d", "--memory", "1GiB"], "--memory cannot be combined with --disk: it is for caches"),
        (["--disk", "d", "--out", "a.png"], "--out cannot be combined with --disk: it is for caches"),
        (["--disk", "d", "--cache-window", 4], "--cache-window cannot be combined with --disk: it is for caches"),
        (["--disk", "d", "--mesh", 2], "--disk cannot be combined with --mesh: they are different questions"),
        (["--disk", "/proc/none"], "cannot be made"),
    ],
)
def test_what_is_refused(in_process, data, options, error):
    code, _, found = in_process(advise, "--data", data, "--model", "deepfm", "--batch-size", 500, *options)
    assert code == 2 and error in found and found.count("\n") == 1
