"""A table of events, files of its days that have arrived, and a run that has followed them."""

import pyarrow.csv
import pyarrow.parquet
import pytest

from hostdev.commands import train
from hostdev.data.preprocess import cli as preprocess
from tests.data import events
from tests.follow.arriving import COLUMNS, DAYS, END, MODEL, NAMES, ROWS, RULES, day, write


@pytest.fixture(scope="module")
def table():
    return events.make(days=DAYS, rows=ROWS)


@pytest.fixture(scope="module")
def example(tmp_path_factory, table):
    """A data set with raw ids of the first rows; its test rows are not those of the files."""
    folder = tmp_path_factory.mktemp("example")
    pyarrow.csv.write_csv(table.slice(0, ROWS), folder / "first.csv")
    make = [
        "table",
        folder / "first.csv",
        "--out",
        folder / "data",
        *COLUMNS,
        "--ids",
        "raw",
        "--test-after",
        "hour=20",
    ]
    preprocess.main(list(map(str, make)))
    return folder / "data"


@pytest.fixture(scope="module")
def arrived(tmp_path_factory, table):
    """A folder in which all files have arrived. Tests must not change it."""
    folder = tmp_path_factory.mktemp("arrived") / "in"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        write(folder / name, day(table, number))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, example, arrived):
    """The run directory of a replay."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *END, "--run-dir", folder]
    train.main(list(map(str, every)))
    return folder
