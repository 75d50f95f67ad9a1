"""`hostdev neighbours`: names, ids and keys of the nearest rows, and errors in one line."""

import re

import numpy as np
import pyarrow as pa
import pytest

import hostdev
from hostdev.checkpoint.layers import Layers
from hostdev.commands import train
from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.neighbours import cli as neighbours
from tests.data import movies

OWN = ["--model", "tests.own_models:ThreeTables"]
SMALL = [
    "--batch-size",
    200,
    "--epochs",
    1,
    "--emb-dim",
    4,
    "--device",
    "cpu",
    "--max-steps",
    3,
    "--checkpoint-every",
    3,
]


def call(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, films):
    """Runs on films: by row, by key with a vocabulary, by key with raw ids, with hashed ids, of an own model."""
    path = tmp_path_factory.mktemp("runs")
    made = movies.make(rows=1500, users=80, items=60).write_csv(path / "films.csv")
    flags = ["table", made, "--label", "liked", "--categorical", "user,item"]
    assert call(preprocess, *flags, "--ids", "raw", "--out", path / "raw") == 0
    assert call(preprocess, *flags, "--hash-buckets", 500, "--out", path / "hashed") == 0
    dynamic = ["--tables", "dynamic", "--capacity", 5000, "--host-device-mix"]
    assert call(train, "--data", films, "--run-dir", path / "run", "--model", "deepfm", *SMALL) == 0
    assert call(train, "--data", films, "--run-dir", path / "keys", "--model", "deepfm", *SMALL, *dynamic) == 0
    assert (
        call(train, "--data", path / "raw", "--run-dir", path / "rawkeys", "--model", "deepfm", *SMALL, *dynamic) == 0
    )
    assert call(train, "--data", path / "hashed", "--run-dir", path / "buckets", "--model", "deepfm", *SMALL) == 0
    assert call(train, "--data", films, "--run-dir", path / "own", *OWN, *SMALL) == 0
    table = hostdev.HostTable(9, 2, hostdev.LazyAdam(), name="t")
    by_key = hostdev.HostTable(None, 3, hostdev.LazyAdam(), name="by key", capacity=100)
    runtime = hostdev.Runtime({"x": table, "y": by_key}, depth=0)
    for _, rows in runtime.train([np.arange(4)], ids=lambda batch: {"x": batch, "y": batch * 10 - 5}):
        (rows["x"].sum() + rows["y"].sum()).backward()
    runtime.save(path / "saved")
    return path


def parse(out):
    """Return the printed lines below the head as lists of words."""
    return [line.split() for line in out.splitlines()[3:]]


@pytest.mark.parametrize("run", ["run", "keys"])
@pytest.mark.parametrize(("column", "space", "value"), [("item", "item", "m0001"), ("history", "item", "m0007")])
def test_names_scores_and_ids(in_process, films, runs, run, column, space, value):
    given = ["--checkpoint", runs / run, "--table", "vectors", "--column", column, "--of", value, "--k", 5]
    code, out, error = in_process(neighbours, *given, "--metric", "l2")
    assert (code, error) == (0, "")
    model = hostdev.open(runs / run)
    found = manifest.read(films)
    vocabulary = pa.ipc.open_file(films / found.vocabulary).read_all()
    [of] = [each for each in found.schema.spaces if each.name == space]
    ids = np.arange(of.first, of.first + of.size)
    names = vocabulary["value"].slice(of.first, of.size).to_pylist()
    there = np.isin(ids, Layers(model._chain).merged("vectors").columns.keys) if run == "keys" else ids >= 0
    options = {"unknown": "item"} if run == "keys" else {}
    weights = model["vectors"].lookup(ids, **options).astype(np.float64)
    far = np.linalg.norm(weights - weights[names.index(value)], axis=1)
    far[~there | (ids == ids[names.index(value)])] = np.inf
    nearest = np.argsort(far, kind="stable")[:5]
    assert parse(out) == [
        [str(rank), f"{far[at]:.6g}", str(ids[at]), names[at]] for rank, at in enumerate(nearest.tolist(), 1)
    ]
    lines = out.splitlines()
    key = "key" if run == "keys" else "id"
    assert lines[0] == f"nearest  to '{value}' ({key} {ids[names.index(value)]}) by l2"
    assert lines[1].startswith(
        f"among    {np.count_nonzero(there)} rows of table 'vectors', column '{space}' of {runs}"
    )
    assert lines[2].split() == ["rank", "score", key, space]
    same = in_process(neighbours, *given[:4], "--of-id", ids[names.index(value)], *given[-2:], "--metric", "l2")
    assert same == (0, out, "")


def test_hashed_and_raw_ids_have_no_names(in_process, runs):
    for run, key in (("rawkeys", "key"), ("buckets", "id")):
        given = ["--checkpoint", runs / run, "--k", 4]
        code, out, error = in_process(neighbours, *given, "--column", "user", "--of", "u1")
        assert code == 0
        assert error == (
            "hostdev.neighbours: warning: the data's ids are hashed, so rows have no names, and those of all columns "
            "are compared\n"
        )
        number = re.search(rf"nearest  to 'u1' \({key} (\d+)\) by cosine", out)[1]
        assert [len(line) for line in parse(out)] == [3] * 4
        assert number not in [line[2] for line in parse(out)]
        by_id = in_process(neighbours, *given, "--of-id", number)[1]
        assert parse(by_id) == parse(out)


def test_tables_of_a_program(in_process, runs):
    given = ["--checkpoint", runs / "saved", "--metric", "dot", "--k"]
    code, out, error = in_process(neighbours, *given, 8, "--table", "t", "--of", 3)
    assert (code, error) == (0, "")
    weights = hostdev.open(runs / "saved")["t"].lookup(np.arange(9)).astype(np.float64)
    scores = weights @ weights[3]
    scores[3] = -np.inf
    assert [line[2] for line in parse(out)] == [str(at) for at in np.argsort(-scores)[:8]]
    code, out, _ = in_process(neighbours, *given, 3, "--table", "by key", "--of-id", -5)
    assert code == 0
    assert sorted(line[2] for line in parse(out)) == ["15", "25", "5"]


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        ("run", ["--of", "m0001"], "give --column: the data has user, item, genres, history"),
        ("run", ["--of", "x", "--column", "items"], "has no column of ids 'items'; it has user, item, genres, history"),
        ("run", ["--of", "m00", "--column", "item"], "has no such value, or it was too rare in training to have a row"),
        ("run", ["--of", "Dramma", "--column", "genres"], "similar values: Drama"),
        ("run", ["--of", "", "--column", "item"], "has no such value"),
        ("run", ["--of-id", 2], "the data has no value with this id; ids below 4 are those of numeric columns"),
        ("run", ["--of-id", 10**6], "the data has no value with this id"),
        ("run", ["--of-id", 2**63], "is not an integer of 64 bits"),
        ("run", ["--of-id", 9, "--column", "item"], "column 'item' has no row of this number"),
        ("run", ["--of-id", 9, "--k", 0], "--k must be at least 1, not 0"),
        ("run", ["--of", "Drama", "--column", "genres", "--k", 10], "column 'genres' has 9 other rows"),
        ("run", ["--of", "u1", "--column", "user", "--table", "first_order"], "has one number per row, and no vectors"),
        (
            "run",
            ["--of", "u1", "--table", "item"],
            "it has first_order, vectors; 'item' is a column: give --column item",
        ),
        ("run", [], "one of the arguments --of --of-id is required"),
        ("run", ["--of", "a", "--of-id", 3], "not allowed with argument"),
        ("own", ["--of", "u1", "--column", "user"], "give --table: "),
        ("rawkeys", ["--of", "u99999", "--column", "user"], "it was not admitted, or was evicted"),
        ("saved", ["--of", "1"], "give --table: "),
        (
            "saved",
            ["--of", "a", "--table", "t"],
            "was written by Runtime.save, which records no names; give a row number",
        ),
        ("saved", ["--of", "a", "--table", "by key"], "give a key (hostdev.hash_ids returns those of texts)"),
        ("saved", ["--of", "9", "--table", "t"], "--of 9: table 't' has no row of this number; give one of 0..8"),
        ("saved", ["--of", "-1", "--table", "t"], "--of -1: table 't' has no row of this number; give one of 0..8"),
        ("saved", ["--of-id", "7", "--table", "by key"], "--of-id 7: table 'by key' has no row of this key"),
        ("saved", ["--of", "1", "--table", "t", "--column", "c"], "written by Runtime.save, which records no columns"),
        ("saved", ["--of", "1", "--table", "t", "--which", "best"], "leave out --which"),
        ("nothing", ["--of", "1"], "nothing does not exist"),
    ],
)
def test_errors(in_process, runs, run, arguments, message):
    code, out, error = in_process(neighbours, "--checkpoint", runs / run, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("hostdev.neighbours: error: ") and error.count("\n") == 1
    assert message in error


def test_control_characters_of_names_are_escaped(in_process, tmp_path):
    rows = "".join(f"{i % 2},a\x1b[31m{i % 3}\n" for i in range(600))
    (tmp_path / "odd.csv").write_text(f"y,c\n{rows}")
    flags = ["table", "odd.csv", "--label", "y", "--categorical", "c", "--threshold", 0, "--out", "d"]
    assert in_process(preprocess, *flags)[0] == 0
    options = ["--data", "d", "--run-dir", "r", "--model", "deepfm", *SMALL, "--checkpoint-every", 1]
    assert in_process(train, *options)[0] == 0
    code, out, _ = in_process(neighbours, "--checkpoint", "r", "--of", "a\x1b[31m1", "--k", 2)
    assert code == 0
    assert out.startswith("nearest  to 'a\\x1b[31m1' (id ")
    assert sorted(line[3] for line in parse(out)) == ["a\\x1b[31m0", "a\\x1b[31m2"]
