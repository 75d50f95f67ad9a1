"""Probabilities from a checkpoint equal the last evaluation's: raw rows, dicts, frames, shards, unseen values."""

import contextlib
import shutil
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hostdev
from hostdev.checkpoint import folder
from hostdev.checkpoint.layers import SavedRows
from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.criteo import COLUMNS
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.shards import ShardReader
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from hostdev.train import scores
from tests.data import movies

OWN = ["--model", "tests.own_models:ThreeTables"]  # whose class predictions are told, too


def run(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Criteo's text, its data set, and a run with full and incremental checkpoints."""
    path = tmp_path_factory.mktemp("criteo")
    write_text(Synthetic(3000, 5), path / "raw.txt")
    assert run(preprocess, "criteo", path / "raw.txt", "--out", path / "data", "--threshold", 2, "--dense", "log") == 0
    options = ["--data", path / "data", "--batch-size", 400, "--emb-dim", 4, "--epochs", 2, "--device", "cpu"]
    assert run(train, *options, "--host-device-mix", "--checkpoint-every", 3, "--run-dir", path / "run") == 0
    return path


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """A table with bags and shared ids, its data set, and a run of three groups in bfloat16."""
    path = tmp_path_factory.mktemp("films")
    movies.make(rows=2000, users=60, items=40).write_csv(path / "films.csv")
    flags = ["--label", "liked", "--numeric", "age", "--categorical", "user,item", "--bag", "genres=|", "--bag"]
    more = ["history= ", "--share", "history=item", "--dense", "standard", "--out", path / "data"]
    assert run(preprocess, "table", path / "films.csv", *flags, *more) == 0
    options = ["--data", path / "data", "--batch-size", 300, "--epochs", 1, "--device", "cpu", "--precision", "bf16"]
    assert run(train, *options, *OWN, "--checkpoint-every", 2, "--run-dir", path / "run") == 0
    return path


def last_line(path):
    return (path / "run/eval.log").read_text().splitlines()[-1]


@pytest.mark.parametrize("name", ["trained", "films"])
def test_the_last_evaluation(request, name, tmp_path, capsys):
    path = request.getfixturevalue(name)
    capsys.readouterr()
    out = tmp_path / "p.parquet"
    model = OWN if name == "films" else []
    options = ["--checkpoint", path / "run/checkpoints", *model]
    assert run(predict, *options, "--data", path / "data", "--out", out) == 0
    printed = capsys.readouterr().out
    found = pq.read_table(out).to_pandas()
    auc = scores.auc(found["probability"].to_numpy(np.float64), found["label"].to_numpy(np.float32))
    assert f"auc is {auc:.6f}" in last_line(path)
    assert f"AUC {auc:.4f}   log loss" in printed
    logloss = float(last_line(path).split("logloss is ")[1].split(",")[0])
    assert f"log loss {logloss:.4f}" in printed
    assert len(found) == manifest.read(path / "data").rows("test")


def raw_lines(path):
    return (path / "raw.txt").read_text().splitlines()


def test_raw_text_of_rows_never_seen_is_as_its_shards(trained, tmp_path, capsys):
    """Another draw of values, many of them unseen; with and without labels, and with a malformed line."""
    write_text(Synthetic(500, 77), tmp_path / "new.txt")
    lines = (tmp_path / "new.txt").read_text().splitlines()
    assert (
        run(
            predict,
            "--checkpoint",
            trained / "run/checkpoints",
            "--data",
            tmp_path / "new.txt",
            "--out",
            tmp_path / "a.parquet",
        )
        == 0
    )
    assert "AUC" in capsys.readouterr().out
    bare = [line.partition("\t")[2] for line in lines]
    bare.insert(3, "what is this")
    (tmp_path / "bare.txt").write_text("\n".join(bare))
    assert (
        run(
            predict,
            "--checkpoint",
            trained / "run/checkpoints",
            "--data",
            tmp_path / "bare.txt",
            "--out",
            tmp_path / "b.parquet",
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "AUC" not in printed
    assert "1 malformed line has no probability" in printed
    labelled, without = (pq.read_table(tmp_path / f"{name}.parquet") for name in "ab")
    assert without["probability"].null_count == 1
    assert without["probability"][3].as_py() is None
    assert without["label"].null_count == 501
    kept = np.delete(without["probability"].to_numpy(), 3)
    np.testing.assert_array_equal(kept, labelled["probability"].to_numpy())

    # The same rows as a data set of the same vocabulary: of all rows, as training rows of the old one.
    predictor = hostdev.Predictor(trained / "run/checkpoints")
    columns = {name: [line.split("\t")[i] for line in lines] for i, name in enumerate(COLUMNS)}
    np.testing.assert_allclose(predictor(columns), labelled["probability"].to_numpy(), rtol=1e-6)


def test_a_data_sets_own_rows_from_text(trained, tmp_path):
    """Encoding gives the labels, ids and numbers of preprocessing, bit for bit."""
    predictor = hostdev.Predictor(trained / "run/checkpoints")
    columns = {name: [line.split("\t")[i] for line in raw_lines(trained)] for i, name in enumerate(COLUMNS)}
    batch, kept = predictor.encoding.encode_readable(pa.RecordBatch.from_pydict(columns))
    assert len(kept) == len(batch) == 3000
    found = manifest.read(trained / "data")
    rows = {split: next(ShardReader(trained / "data", found, split).batches(10_000)) for split in ("train", "test")}
    key = lambda batch, i: (batch.ids[i].tobytes(), batch.dense[i].tobytes(), float(batch.label[i]))  # noqa: E731
    mine = sorted(key(batch, i) for i in range(len(batch)))
    assert mine == sorted(key(of, i) for of in rows.values() for i in range(len(of)))


@pytest.mark.parametrize("name", ["trained", "films"])
def test_dicts_frames_and_tables(request, name):
    path = request.getfixturevalue(name)
    predictor = hostdev.Predictor(path / "run/checkpoints", model=OWN[1] if name == "films" else None)
    if name == "trained":
        lines = [line.split("\t") for line in raw_lines(path)[:70]]
        frame = pd.DataFrame({column: [line[i] for line in lines] for i, column in enumerate(COLUMNS)}).drop(
            columns="label"
        )
        for column in COLUMNS[1:14]:
            frame[column] = pd.to_numeric(frame[column])
    else:
        frame = pd.read_csv(path / "films.csv").head(70).drop(columns="liked")
        frame["history"] = frame["history"].fillna("")
    expected = predictor(pa.Table.from_pandas(frame))
    assert expected.shape == (70,)
    assert ((expected > 0) & (expected < 1)).all()
    values = {
        column: [None if isinstance(v, float) and np.isnan(v) else v for v in frame[column].tolist()]
        for column in frame
    }
    for given in (frame, pa.RecordBatch.from_pandas(frame), values, {k: np.array(v) for k, v in frame.items()}):
        np.testing.assert_allclose(predictor(given), expected, rtol=1e-6)
    few = {column: listed[:9] for column, listed in values.items()}  # in Python alone, if it has no bags
    np.testing.assert_allclose(predictor(few), expected[:9], rtol=1e-6)
    one = {column: listed[4] for column, listed in values.items()}
    np.testing.assert_allclose(predictor(one), expected[4:5], rtol=1e-6)
    assert len(predictor({column: [] for column in values})) == 0


def test_values_that_training_has_not_seen(films):
    predictor = hostdev.Predictor(films / "run/checkpoints", model=OWN[1])
    row = {"user": "nobody", "item": "m9999", "age": None, "history": "m0001 m7777", "genres": ""}
    batch = predictor.encoding.encode(pa.RecordBatch.from_pydict({k: [v] for k, v in row.items()}))
    spaces = {space.name: space for space in predictor.data.schema.spaces}
    assert batch.ids.tolist() == [[spaces["user"].oov, spaces["item"].oov]]
    values, lengths = batch.bags["history"]
    assert lengths.tolist() == [2]
    assert values[1] == spaces["item"].oov != values[0]
    assert 0 < predictor(row)[0] < 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"user": ["a"]}, "the rows have no column 'age'"),
        ({"user": ["a"], "item": ["b"], "age": ["old"], "genres": [""], "history": [""]}, "row 1, column 'age'"),
        (
            {"user": [0.5], "item": ["b"], "age": [1], "genres": [""], "history": [""]},
            "column 'user': 0.5 is not an int",
        ),
    ],
)
def test_wrong_rows(films, rows, message):
    with pytest.raises(hostdev.UserError, match=message):
        hostdev.Predictor(films / "run/checkpoints", model=OWN[1])(rows)
    with pytest.raises(TypeError, match="rows must be a dict"):
        hostdev.Predictor(films / "run/checkpoints", model=OWN[1])([1, 2])


ROW = {"user": "u1", "item": "m0001", "age": 31.0, "genres": "Drama|War", "history": "m0005 m0007"}


def of_two(**changed):
    """Two rows of films, with some columns replaced."""
    return {**{name: [value, value] for name, value in ROW.items()}, **changed}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (of_two(age=[1.0, 1e40]), r"row 2, column 'age': 1e\+40 is too large"),
        (of_two(age=[1.0, np.inf]), "row 2, column 'age': inf is not a finite number"),
        (of_two(age=[1.0, 10**40]), r"row 2, column 'age': 1e\+40 is too large"),
        (of_two(age=[1, 10**400]), "column 'age' does not have numbers of one type: "),
        (of_two(age=[[1], [2]]), "column 'age' is of type list<.*>; expected one number per row"),
        (of_two(age=[1, "x"]), "column 'age' does not have numbers of one type: "),
        (of_two(age=[1]), "column 'age' has 1 value, but column 'user' has 2; give one value for each row"),
        (of_two(age=3), "column 'age' has a single value, but column 'user' has 2; give one value for each row"),
        (of_two(user=[["a"], ["b"]]), "column 'user' is of type list<.*>; expected one value per row"),
        (of_two(user=["a", 3]), "column 'user' does not have values of one type: "),
        (of_two(genres=["a", ["b"]]), "column 'genres' does not have values of one type: "),
        (of_two(user=["a", "\ud800"]), "column 'user' does not have values of one type: "),
        (of_two(age=np.ones((2, 2))), "column 'age' is of type list<.*>; expected one number"),
        (pd.DataFrame(of_two(age=[1, "x"])), "column 'age' does not have numbers of one type: "),
        (pd.DataFrame([[1, 2]], columns=["user", "user"]), "the rows have no column 'age'; they have user, user"),
        (pa.table([[1.0], [2.0]], ["age", "age"]), "the rows have 2 columns named 'age'"),
        (pa.table(of_two(age=[[1], [2]])), "column 'age' is of type list<.*>; expected one number per row"),
        (pd.Series({"user": "u1"}), "the rows have no column 'age'; they have user"),
    ],
)
def test_rows_of_other_types(films, rows, message):
    with pytest.raises(hostdev.UserError, match=message) as error:
        hostdev.Predictor(films / "run/checkpoints", model=OWN[1])(rows)
    assert "\n" not in str(error.value)


def test_missing_values_labels_and_one_row(films):
    """None and NaN are missing values in text, too; a bag of one row may be a list; labels are ignored."""
    predictor = hostdev.Predictor(films / "run", model=OWN[1])
    texts = {"user": ["u1", np.nan, "u3"], "item": ["m0001", None, "m0003"], "age": [31, None, np.nan]}
    rows = {**texts, "genres": ["Drama|War", np.nan, None], "history": [None, "m0005", "m0005 m0007"]}
    expected = predictor(pd.DataFrame(rows))
    plain = {name: ["" if isinstance(v, float | None) and name != "age" else v for v in rows[name]] for name in rows}
    for given in (
        rows,
        {n: np.array(v, object) for n, v in rows.items()},
        {n: pd.Series(v) for n, v in rows.items()},
        plain,
        {**rows, "liked": ["?", 7, [1]]},
    ):
        np.testing.assert_array_equal(predictor(given), expected)
    [one] = predictor(ROW)
    lists = {"genres": ["Drama", "War"], "history": ("m0005", "m0007")}
    for given in ({**ROW, **lists}, pd.Series(ROW), {**ROW, "age": np.float64(31), **lists}):
        np.testing.assert_array_equal(predictor(given), [one])
    assert len(predictor({**ROW, "genres": [], "history": None})) == 1
    two = of_two(genres=[["Drama", "War"], []], history=[np.array(["m0005", "m0007"]), None])
    assert predictor(two)[0] == pytest.approx(one, rel=1e-6)


def test_what_cannot_be_read_in_a_few_rows(trained):
    """Values that only the Python path encodes."""
    predictor = hostdev.Predictor(trained / "run")
    line = dict(zip(COLUMNS, raw_lines(trained)[0].split("\t"), strict=True))
    row = {name: value if name[0] == "C" else 3 for name, value in line.items() if name != "label"}
    assert 0 < predictor(row)[0] < 1
    for wrong, message in (
        (np.inf, "row 1, column 'I2': inf is not a finite number"),
        (10**400, "column 'I2' does not"),
    ):
        with pytest.raises(hostdev.UserError, match=message):
            predictor({**row, "I2": wrong})
    with pytest.raises(hostdev.UserError, match="column 'C1' does not have values of one type"):
        predictor({**row, "C1": "\ud800"})


def test_a_result_that_is_not_finite(films, tmp_path, capsys, monkeypatch):
    """A number may overflow the model, though float32 can hold it."""
    predict_logits = hostdev.Predictor.logits
    too_large = lambda self, batch: np.where(batch.dense[:, 0] > 100, np.nan, predict_logits(self, batch))  # noqa: E731
    monkeypatch.setattr(hostdev.Predictor, "logits", lambda *args: too_large(*args).astype(np.float32))
    with pytest.raises(hostdev.UserError, match="row 2: the model's result is not a .* number is in column 'age'"):
        hostdev.Predictor(films / "run", model=OWN[1])(of_two(age=[31, 1e9]))
    pd.DataFrame(of_two(age=[31, 1e9], liked=[1, 0])).to_csv(tmp_path / "t.csv", index=False)
    options = ["--checkpoint", films / "run", *OWN, "--data", tmp_path / "t.csv", "--out", tmp_path / "p.parquet"]
    assert run(predict, *options) == 0
    assert "         1 malformed line has no probability" in capsys.readouterr().out
    assert pq.read_table(tmp_path / "p.parquet")["probability"].is_null().to_pylist() == [False, True]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_numbers_and_labels_that_cannot_be_read(films, tmp_path, capsys, form):
    """A row with an invalid number has no probability; one without a label is predicted, and not in the AUC."""
    frame = pd.read_csv(films / "films.csv", dtype=str, keep_default_na=False).head(40)
    whole = tmp_path / "whole.csv"
    frame.to_csv(whole, index=False)
    wrong = {3: "old", 4: "inf", 7: "1e40", 8: "-Infinity", 20: "1.2.3"}
    for row, value in wrong.items():
        frame.loc[row, "age"] = value
    frame.loc[[3, 10], "liked"] = ""
    frame.loc[[11, 12], "liked"] = ["maybe", "2"]
    data = tmp_path / f"some.{form}"
    frame.to_csv(data, index=False) if form == "csv" else frame.to_parquet(data)
    if form == "csv":  # and a line of too few values, after the first row
        lines = data.read_text().splitlines()
        data.write_text("\n".join([*lines[:2], "short", *lines[2:]]))
    for name, path in (("whole", whole), ("some", data)):
        out = tmp_path / "made" / "here" / f"{name}.parquet"
        assert run(predict, "--checkpoint", films / "run", *OWN, "--data", path, "--out", out) == 0
    printed = capsys.readouterr().out
    found, expected = (pq.read_table(tmp_path / "made/here" / f"{name}.parquet") for name in ("some", "whole"))
    table = found.to_pandas()
    if form == "csv":
        assert np.isnan(table["probability"][1])
        table = table.drop(index=1).reset_index(drop=True)
    assert np.flatnonzero(table["probability"].isna()).tolist() == sorted(wrong)
    kept = np.delete(np.arange(40), sorted(wrong))
    np.testing.assert_allclose(table["probability"][kept], expected["probability"].to_numpy()[kept], rtol=1e-6)
    assert set(np.flatnonzero(table["label"][kept].isna().to_numpy())) == {kept.tolist().index(n) for n in (10, 11, 12)}
    assert f"         {5 + (form == 'csv')} malformed lines have no probability\n" in printed
    assert "         3 rows without a label that can be read\nAUC" in printed
    assert " of the 32 rows with labels" in printed


def test_labels_of_criteos_text_that_cannot_be_read(trained, tmp_path, capsys):
    lines = raw_lines(trained)[:50]
    (tmp_path / "whole.txt").write_text("\n".join(lines))
    for row, label in ((1, ""), (2, "2"), (3, "yes"), (49, "-1")):
        lines[row] = label + lines[row][1:]
    lines[5:5] = ["", "x", "\t\t"]
    (tmp_path / "some.txt").write_text("\n".join(lines) + "\n")
    for name in ("whole", "some"):
        options = ["--data", tmp_path / f"{name}.txt", "--out", tmp_path / f"{name}.parquet"]
        assert run(predict, "--checkpoint", trained / "run", *options) == 0
    printed = capsys.readouterr().out
    assert "         3 malformed lines have no probability\n         4 rows without a label that can be read" in printed
    found, expected = (pq.read_table(tmp_path / f"{name}.parquet").to_pandas() for name in ("some", "whole"))
    assert np.flatnonzero(found["probability"].isna()).tolist() == [5, 6, 7]
    found = found.drop(index=[5, 6, 7]).reset_index(drop=True)
    np.testing.assert_allclose(found["probability"], expected["probability"], rtol=1e-6)
    assert np.flatnonzero(found["label"].isna()).tolist() == [1, 2, 3, 49]
    rest = found["label"].notna()
    np.testing.assert_array_equal(found["label"][rest], expected["label"][rest])


def test_an_error_that_remains_names_the_row_of_the_file(films, tmp_path, capsys):
    rows = {name: [value] * 70_000 for name, value in ROW.items()}
    users = [1.0] * 70_000
    users[66_000] = 0.5
    pq.write_table(pa.table({**rows, "user": users}), tmp_path / "t.parquet")
    options = ["--data", tmp_path / "t.parquet", "--out", tmp_path / "p.parquet"]
    assert run(predict, "--checkpoint", films / "run", *OWN, *options) == 2
    assert f"{tmp_path / 't.parquet'}, row 66001, column 'user': 0.5 is not an integer" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["t.parquet"]


def test_the_newest_is_damaged(trained, tmp_path, capsys):
    shutil.copytree(trained / "run", tmp_path / "run")
    names = folder.names_in(tmp_path / "run/checkpoints")
    file = tmp_path / "run/checkpoints" / names[-1] / "checkpoint.json"
    file.write_text("{}")
    told = f"{file} is broken ('format'); using an older one: {file.parent.parent / names[-2]}"
    options = ["--data", trained / "data", "--out", tmp_path / "p.parquet"]
    assert run(predict, "--checkpoint", tmp_path / "run", *options) == 0
    assert capsys.readouterr().err == f"hostdev.predict: {told}\n"
    with pytest.warns(UserWarning) as warnings:
        assert hostdev.Predictor(tmp_path / "run").path.name == names[-2]
    assert [str(each.message) for each in warnings] == [told]


def test_a_full_disk_is_named(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hostdev.ext.predict.command.new_file", lambda out: contextlib.nullcontext(Path("/dev/full")))
    options = ["--data", trained / "raw.txt", "--out", tmp_path / "p.parquet"]
    assert run(predict, "--checkpoint", trained / "run", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hostdev.predict: error: {tmp_path / 'p.parquet'}: ")
    assert "No space left on device" in error
    assert list(tmp_path.iterdir()) == []


def test_many_threads(trained):
    predictor = hostdev.Predictor(trained / "run/checkpoints")
    lines = [line.split("\t") for line in raw_lines(trained)[:60]]
    rows = [{column: [line[i]] for i, column in enumerate(COLUMNS) if i} for line in lines]
    expected = [predictor(row)[0] for row in rows]
    found = [[] for _ in range(4)]

    def work(out):
        out.extend(predictor(row)[0] for row in rows)

    threads = [threading.Thread(target=work, args=(out,)) for out in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out == expected for out in found)


@pytest.mark.parametrize("number", [0, -1])
def test_mapped_tables_are_the_checkpoints(trained, number):
    names = folder.names_in(trained / "run/checkpoints")
    chain = folder.read_chain(trained / "run/checkpoints" / names[number])
    from hostdev.checkpoint.layers import Layers

    for table in chain[-1].manifest.tables:
        expected = np.concatenate(list(Layers(chain).column(table.name, "weights")))
        mapped = SavedRows(chain, table.name)
        opened = hostdev.open(chain[-1].path)[table.name]
        np.testing.assert_array_equal(opened.lookup(np.arange(table.rows)), expected)
        for dtype in (np.int32, np.int64):
            ids = np.random.default_rng(0).integers(0, table.rows, 5000).astype(dtype)
            np.testing.assert_array_equal(mapped.lookup(ids), expected[ids])
        with pytest.raises(hostdev.UserError, match="outside"):
            mapped.lookup(np.array([table.rows]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere"], "--data nowhere: there is no such file or data set"),
        (["--checkpoint", "nowhere"], "there is no file or folder nowhere"),
        (["--out", "p.txt"], "--out p.txt: predictions are written as Parquet or CSV; give p.parquet or p.csv"),
        (["--keep", "user"], "is Criteo text, whose columns have no names; there is no column 'user'"),
        (["--keep", "label"], "--keep label: the predictions have a column of that name"),
        (["--keep", "a,a"], "--keep names 'a' twice"),
        (["--at", "5"], "--at has no effect without --by NAME"),
        (["--by", "C1", "--at", "0"], "--at must be at least 1, not 0"),
        (["--out", "taken/p.parquet"], "taken: File exists"),
        (["--out", "taken"], "--out taken exists; choose another file"),
        (["--split", "train"], "--split has no effect on"),
    ],
)
def test_wrong_options(trained, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    base = ["--checkpoint", trained / "run/checkpoints", "--data", trained / "raw.txt", "--out", "p.parquet"]
    assert run(predict, *base, *options) == 2
    assert message in capsys.readouterr().err


def test_no_numbers_and_columns_of_other_lengths(tmp_path):
    (tmp_path / "t.csv").write_text("liked,user,item\n" + "".join(f"{i % 2},u{i % 7},m{i % 5}\n" for i in range(300)))
    flags = ["--label", "liked", "--categorical", "user,item", "--out", tmp_path / "data"]
    assert run(preprocess, "table", tmp_path / "t.csv", *flags) == 0
    options = ["--data", tmp_path / "data", "--batch-size", 50, "--emb-dim", 4, "--epochs", 1, "--device", "cpu"]
    options += ["--model", "deepfm", "--checkpoint-every", 9, "--run-dir", tmp_path / "run"]
    assert run(train, *options) == 0
    predictor = hostdev.Predictor(tmp_path / "run/checkpoints")
    rows = {"user": ["u1", "u2", "new"], "item": ["m1", "m2", "m3"]}
    np.testing.assert_allclose(predictor(rows), predictor(pa.table(rows)), rtol=1e-6)
    with pytest.raises(
        hostdev.UserError, match="column 'item' has 1 value, but column 'user' has 3; give one value for"
    ):
        predictor({"user": ["u1", "u2", "u3"], "item": ["m1"]})


def test_a_data_set_of_other_columns(trained, films, tmp_path, capsys):
    options = ["--checkpoint", trained / "run/checkpoints", "--data", films / "data", "--out", tmp_path / "p.parquet"]
    assert run(predict, *options) == 2
    assert "has different columns, ids or scales than" in capsys.readouterr().err


def test_a_checkpoint_of_a_program_of_its_own(tmp_path):
    table = hostdev.HostTable(10, 2, hostdev.SGD(lr=0.1), name="t")
    hostdev.Runtime({"t": table}, device="cpu").save(tmp_path / "c")
    with pytest.raises(hostdev.UserError, match="written by Runtime.save, which does not record the model; use"):
        hostdev.Predictor(tmp_path / "c")


def test_hashed_ids(tmp_path, capsys):
    write_text(Synthetic(800, 5), tmp_path / "raw.txt")
    data = tmp_path / "data"
    assert run(preprocess, "criteo", tmp_path / "raw.txt", "--out", data, "--hash-buckets", 500) == 0
    options = ["--data", data, "--batch-size", 200, "--emb-dim", 4, "--epochs", 1, "--device", "cpu"]
    assert run(train, *options, "--checkpoint-every", 9, "--run-dir", tmp_path / "run") == 0
    predictor = hostdev.Predictor(tmp_path / "run/checkpoints")
    lines = [line.split("\t") for line in (tmp_path / "raw.txt").read_text().splitlines()]
    columns = {name: [line[i] for line in lines] for i, name in enumerate(COLUMNS)}
    out = tmp_path / "p.parquet"
    assert run(predict, "--checkpoint", predictor.path, "--data", tmp_path / "raw.txt", "--out", out) == 0
    np.testing.assert_allclose(predictor(columns), pq.read_table(out)["probability"].to_numpy(), rtol=1e-6)
    batch = predictor.encoding.encode(pa.RecordBatch.from_pydict(columns))
    found = manifest.read(data)
    rows = [next(ShardReader(data, found, split).batches(10_000)) for split in ("train", "test")]
    assert sorted(row.tobytes() for row in batch.ids) == sorted(row.tobytes() for of in rows for row in of.ids)
    numbers = {f"I{i}": [int(text) if text else None for text in columns[f"I{i}"][:7]] for i in range(1, 14)}
    few = predictor.encoding.plain.encode({name: columns[name][:7] for name in predictor.encoding.columns()} | numbers)
    np.testing.assert_array_equal(few.ids, batch.ids[:7])
    np.testing.assert_array_equal(few.dense, batch.dense[:7])
    wrong = {name: columns[name][:1] for name in predictor.encoding.columns()} | {"C3": ["0x"]}
    with pytest.raises(hostdev.UserError, match="'0x' is neither 8 hexadecimal digits nor empty"):
        predictor(wrong)
