"""What `predict` writes and prints beside the probabilities: kept columns, CSV, figures within groups, calibration."""

import io
import re
import sys

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.shards import ShardReader
from hostdev.ext.predict import cli as predict
from hostdev.ext.predict.measures import rank
from hostdev.ext.predict.output import kept_columns
from hostdev.ext.training import cli as train
from tests import forks
from tests.data import movies
from tests.models.samples import schema_of


def run(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    path = tmp_path_factory.mktemp("films")
    movies.make(rows=1500, users=40, items=30).write_csv(path / "films.csv")
    flags = ["--label", "liked", "--categorical", "user,item", "--bag", "genres=|", "--out", path / "data"]
    assert run(preprocess, "table", path / "films.csv", *flags) == 0
    options = ["--data", path / "data", "--batch-size", 300, "--epochs", 1, "--device", "cpu", "--emb-dim", 4]
    assert run(train, *options, "--checkpoint-every", 100, "--run-dir", path / "run") == 0
    return path


def test_kept_columns_and_groups_of_a_file(films, tmp_path, capsys):
    """The columns of the file beside each probability; figures of a column that is no feature; malformed lines too."""
    frame = pd.read_csv(films / "films.csv", dtype=str)
    frame["shop"] = [f"s{i % 7}" for i in range(len(frame))]
    frame.to_csv(tmp_path / "t.csv", index=False)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    (tmp_path / "t.csv").write_text("\n".join([*lines[:5], "too,few", *lines[5:]]) + "\n")
    capsys.readouterr()
    for name in ("p.parquet", "p.csv"):
        more = ["--keep", "item,shop", "--by", "shop", "--at", 3]
        assert (
            run(predict, "--checkpoint", films / "run", "--data", tmp_path / "t.csv", "--out", tmp_path / name, *more)
            == 0
        )
    printed = capsys.readouterr().out
    found = pq.read_table(tmp_path / "p.parquet").to_pandas()
    assert list(found.columns) == ["probability", "label", "item", "shop"]
    assert found.loc[4].isna().all()
    found = found.drop(index=4).reset_index(drop=True)
    assert found["item"].tolist() == frame["item"].tolist()
    assert found["shop"].tolist() == frame["shop"].tolist()
    text = pd.read_csv(tmp_path / "p.csv")
    assert len(text) == len(frame) + 1
    np.testing.assert_allclose(text["probability"].drop(index=4), found["probability"], rtol=1e-6)
    groups = frame["shop"].str[1:].to_numpy(np.uint64)
    expected = rank(groups, found["probability"].to_numpy(np.float32), found["label"].to_numpy() == 1, 3)
    assert (
        f"by shop: GAUC {expected.gauc:.4f} over the 7 of 7 values with both labels   NDCG@3 {expected.ndcg:.4f}   "
        f"recall@3 {expected.recall:.4f} over the 7 with a positive row\n"
    ) in printed
    calibration = found["probability"].astype(float).sum() / found["label"].sum()
    assert f"   calibration {calibration:.4f}" in printed


def test_groups_of_a_data_set(films, tmp_path, capsys):
    capsys.readouterr()
    options = ["--checkpoint", films / "run", "--data", films / "data", "--split", "train"]
    assert run(predict, *options, "--out", tmp_path / "p.parquet", "--by", "user") == 0
    printed = capsys.readouterr().out
    found = manifest.read(films / "data")
    [batch] = ShardReader(films / "data", found, "train").batches(1 << 20)
    probability = pq.read_table(tmp_path / "p.parquet")["probability"].to_numpy()
    ids = batch.ids[:, 0]
    kept = ids >= found.schema.first_value
    expected = rank(ids[kept].astype(np.uint64), probability[kept], batch.label[kept] == 1, 10)
    shown = re.search(
        r"by user: GAUC (\S+) over the (\d+) of (\d+) values .* NDCG@10 (\S+)   recall@10 (\S+) ", printed
    )
    assert [int(shown[i]) for i in (2, 3)] == [expected.mixed, expected.groups]
    close = pytest.approx([expected.gauc, expected.ndcg, expected.recall], abs=1e-3)  # logits have fewer equal ones
    assert [float(shown[i]) for i in (1, 4, 5)] == close
    for more, message in (
        (["--by", "genres"], "--by genres: the data set has no such column with one id per row; it has user, item"),
        (["--keep", "user"], "--keep has no effect on "),
    ):
        assert run(predict, *options, "--out", tmp_path / "q.parquet", *more) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "q.parquet").exists()


@pytest.mark.parametrize("hashed", [False, True])
def test_rows_without_a_user_are_left_out(films, tmp_path, capsys, hashed):
    """In files of each kind, and in a data set, where a missing value has an id like any other."""
    frame = pd.read_csv(films / "films.csv", dtype=str)
    frame.loc[::3, "user"] = None
    frame.loc[1::9, "user"] = "?"
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    numbers = frame.assign(user=frame["user"].str[1:].where(frame["user"] != "?").astype(float))
    numbers.to_parquet(tmp_path / "numbers.parquet")
    flags = ["--label", "liked", "--categorical", "user,item", "--missing", "?", "--test-fraction", "0.5"]
    flags += ["--hash-buckets", 100_003] if hashed else []
    assert run(preprocess, "table", tmp_path / "t.csv", *flags, "--out", tmp_path / "data") == 0
    options = ["--data", tmp_path / "data", "--batch-size", 300, "--epochs", 1, "--device", "cpu", "--emb-dim", 4]
    assert run(train, *options, "--checkpoint-every", 100, "--run-dir", tmp_path / "run") == 0
    there = ~frame["user"].isin(["?"]) & frame["user"].notna()
    assert 0 < there.sum() < len(frame)
    for name in ("t.csv", "t.parquet", "numbers.parquet", "data"):
        column = "user" if name != "numbers.parquet" else "who"
        path = tmp_path / name
        if column == "who":
            numbers.rename(columns={"user": "who"}).assign(user=frame["user"]).to_parquet(path)
        capsys.readouterr()
        command = ["--checkpoint", tmp_path / "run", "--data", path, "--out", tmp_path / f"{name}.p.parquet"]
        assert run(predict, *command, "--by", column) == 0
        printed = capsys.readouterr().out
        shown = re.search(rf"by {column}: GAUC (\S+) over the \d+ of (\d+) values", printed)
        assert re.search(rf"\d+ rows left out because {column} is missing", printed)
        if name == "data":
            assert int(shown[2]) <= 40
            continue
        assert f"{len(frame) - there.sum()} rows left out because {column} is missing" in printed
        found = pq.read_table(tmp_path / f"{name}.p.parquet").to_pandas()[there.to_numpy()]
        groups = pd.factorize(frame["user"][there])[0].astype(np.uint64)
        expected = rank(groups, found["probability"].to_numpy(np.float32), found["label"].to_numpy() == 1, 10)
        assert (f"{expected.gauc:.4f}", expected.groups) == (shown[1], int(shown[2]))


def test_no_rows(films, tmp_path, capsys):
    """A file with columns and no row: no figures, and a file with columns."""
    frame = pd.read_csv(films / "films.csv", dtype=str).head(0)
    frame.astype(str).to_parquet(tmp_path / "none.parquet")
    options = ["--checkpoint", films / "run", "--data", tmp_path / "none.parquet", "--out", tmp_path / "p.csv"]
    assert run(predict, *options, "--by", "user", "--keep", "item") == 0, capsys.readouterr().err
    assert "by user: GAUC nan over the 0 of 0 values" in capsys.readouterr().out
    assert (tmp_path / "p.csv").read_text() == '"probability","label","item"\n'


def test_standard_input(films, tmp_path):
    command = [sys.executable, "-m", "hostdev.predict", "--checkpoint", films / "run", "--data", "-", "--out", "p.csv"]
    with (films / "films.csv").open("rb") as rows:
        forks.run(command, cwd=tmp_path, stdin=rows, check=True, capture_output=True)
    assert run(predict, *command[3:5], "--data", films / "films.csv", "--out", tmp_path / "q.csv") == 0
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "q.csv").read_bytes()
    assert len(pd.read_csv(io.BytesIO((tmp_path / "p.csv").read_bytes()))) == 1500


def test_a_column_of_a_file_that_it_has_not(films, tmp_path, capsys):
    options = ["--checkpoint", films / "run", "--data", films / "films.csv", "--out", tmp_path / "p.csv"]
    assert run(predict, *options, "--keep", "nothing") == 2
    assert "films.csv has no column 'nothing'; it has" in capsys.readouterr().err
    assert kept_columns('"a,b", c', schema_of()) == ["a,b", "c"]
