"""Files as users have them: made-up rows in the formats of public data sets, and real rows where there are any."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from tests.conftest import ROOT
from tests.data import twins

AVAZU = """id,click,hour,C1,site_id,site_category,app_id,device_ip,C14,C20,C21
90000000000000000001,0,30010100,7,site0001,aaaa0001,app00001,10000001,500,-1,7
90000000000000000002,0,30010100,7,site0001,aaaa0001,app00001,10000002,501,900,7
90000000000000000003,1,30010100,8,site0002,aaaa0002,app00001,10000003,501,900,7
90000000000000000004,0,30010101,7,site0001,aaaa0001,app00001,10000004,500,900,8
90000000000000000005,1,30010101,7,site0002,aaaa0003,app00001,10000005,502,-1,8
"""
CENSUS = """30, Potter, 7, Some school, Evenings, Female,12.5, ?, 1, 50000+.
9, Miller, 8, Another school, Mornings, Male,3.25, Moved, 2, - 50000.
1, No work, 0, None at all, No school, Male,4.75, Moved, 2, - 50000.
52, Potter, 7, Some school, Evenings, Female,, ?, 1, 50000+.
"""
CRITEO = """label,I1,I2,I3,C1,C2,C3
0,,3,20.0,000000a1,000000b1,
0,,-1,7.0,000000a2,000000b2,000000c1
1,0.0,0,2.0,000000a1,000000b3,
0,1.0,13,1.0,000000a1,000000b4,000000c2
"""
MOVIELENS = """user_id,movie_id,rating,timestamp,title,genres,gender,age,occupation,zip
1,10,4,100,First Film (1901),Comedy|Drama,F,20,1,11111
2,20,3,200,Second Film (1902),Action|Thriller,M,30,2,01234
3,30,4,400,"Third Film, The (1903)",Drama|Romance,F,40,3,33333
3,10,5,500,First Film (1901),Comedy|Drama,F,40,3,33333
4,40,3,300,Fourth,,M,50,4,44444
"""
MADE = {
    "avazu_sample.txt": AVAZU,
    "census-income.sample": CENSUS,
    "criteo_sample.txt": CRITEO,
    "movielens_sample.txt": MOVIELENS,
}


@pytest.fixture(params=["made", "real"])
def sample(request, tmp_path):
    """A function from a file's name to its path: made here, or the real rows, which are not ours to ship."""

    def path_of(name):
        if request.param == "made":
            (tmp_path / name).write_text(MADE[name])
            return tmp_path / name
        path = Path(os.environ.get("HOSTDEV_SAMPLES", ROOT.parent / "shared/data/samples")) / name
        if not path.is_file():
            pytest.skip(f"no sample at {path}; set HOSTDEV_SAMPLES")
        return path

    return path_of


@pytest.fixture
def prepared(in_process, tmp_path):
    """Preprocess with the command, and return the manifest."""

    def run(path, *options):
        code, _, error = in_process(preprocess, "table", path, "--out", "out", "--threshold", 0, *options)
        assert (code, error) == (0, "")
        return manifest.read(tmp_path / "out")

    return run


def rows_of(path, **how):
    with path.open(newline="") as file:
        return list(csv.DictReader(file, **how))


def all_rows(folder):
    """The rows of both splits with values for ids, in no order."""
    names = [value for _, value, _ in twins.vocabulary(folder)]
    rows = twins.read(folder, "train") + twins.read(folder, "test")
    return [
        (label, dense, [names[i] for i in ids], [[names[i] for i in bag] for bag in bags])
        for label, dense, ids, bags in rows
    ]


def test_avazu(sample, prepared, tmp_path):
    path = sample("avazu_sample.txt")
    rows = rows_of(path)
    hours, site = sorted({row["hour"] for row in rows}), rows[0]["site_id"]
    split = ("--test-after", f"hour={hours[0]}") if len(hours) > 1 else ("--test-column", f"site_id={site}")
    columns = "C1,site_id,site_category,app_id,device_ip,C14,C21"
    found = prepared(path, "--label", "click", "--categorical", columns, "--numeric", "C20", "--dense", "log", *split)
    assert found.rows("train") + found.rows("test") == len(rows)
    test = [row["hour"] > hours[0] if len(hours) > 1 else row["site_id"] == site for row in rows]
    assert found.rows("test") == sum(test)
    training = [row for row, of_test in zip(rows, test, strict=True) if not of_test]
    for name, space in zip(columns.split(","), found.schema.spaces, strict=True):
        assert space.size == len({row[name] for row in training})
    assert [row[0] for row in twins.read(tmp_path / "out", "train")] == [int(row["click"]) for row in training]
    assert [row[1][0] < 0 for row in twins.read(tmp_path / "out", "train")] == [row["C20"] == "-1" for row in training]


def test_criteo_with_a_header(sample, prepared, tmp_path):
    path = sample("criteo_sample.txt")
    rows = rows_of(path)
    tested = rows[1]["C1"]
    found = prepared(
        path, "--label", "label", "--numeric", "I1,I2,I3", "--categorical", "C1,C2,C3", "--test-column", f"C1={tested}"
    )
    most = [max(abs(float(row[name] or 0)) for row in rows if row["C1"] != tested) for name in ("I1", "I2", "I3")]
    expected = [
        (
            int(row["label"]),
            [float(np.float32(float(row[f"I{i + 1}"] or 0) / (most[i] or 1))) for i in range(3)],
            [row["C1"], row["C2"], row["C3"]],
            [],
        )
        for row in rows
        if row["C1"] != tested
    ]
    assert found.statistics["dense_max"] == most
    assert all_rows(tmp_path / "out")[: len(expected)] == expected


def test_movielens_with_a_bag_of_genres(sample, prepared, tmp_path):
    path = sample("movielens_sample.txt")
    rows = rows_of(path)
    last = sorted(int(row["timestamp"]) for row in rows)[len(rows) // 2]
    found = prepared(
        path,
        "--label",
        "rating",
        "--positive",
        ">3",
        "--categorical",
        "user_id,movie_id,gender,occupation,zip",
        "--bag",
        "genres=|",
        "--numeric",
        "age",
        "--test-after",
        f"timestamp={last}",
    )
    training = [row for row in rows if int(row["timestamp"]) <= last]
    assert found.rows("train") == len(training)
    expected = [
        (
            float(int(row["rating"]) > 3),
            [row["user_id"], row["movie_id"], row["gender"], row["occupation"], row["zip"]],
            [row["genres"].split("|") if row["genres"] else []],
        )
        for row in training
    ]
    assert [(label, ids, bags) for label, _, ids, bags in all_rows(tmp_path / "out")][: len(training)] == expected
    genres = next(space for space in found.schema.spaces if space.name == "genres")
    assert genres.size == len({genre for row in expected for genre in row[2][0]})
    assert any(row[1][4].startswith("0") for row in expected)  # a zip code is no number


def test_census_without_a_header(sample, prepared, tmp_path):
    path = sample("census-income.sample")
    n = len(path.read_text().split("\n", 1)[0].split(","))
    names = [f"c{i}" for i in range(n)]
    kinds = ("c1", "c3", "c5") if n == 10 else ("c4", "c5", "c8")
    found = prepared(
        path,
        "--columns",
        ",".join(names),
        "--label",
        names[-1],
        "--positive",
        "50000+.",
        "--categorical",
        ",".join(kinds),
        "--numeric",
        "c0" if n == 10 else "c1",
        "--test-fraction",
        0.4,
        "--seed",
        3,
    )
    rows = rows_of(path, fieldnames=names)
    assert found.rows("train") + found.rows("test") == len(rows)
    labels = [row[0] for row in all_rows(tmp_path / "out")]
    assert sum(labels) == sum(row[names[-1]].strip() == "50000+." for row in rows) > 0
    values = {value for row in rows for value in (row[kind].strip() for kind in kinds)}
    assert {value for _, value, _ in twins.vocabulary(tmp_path / "out")} - {None} <= values
