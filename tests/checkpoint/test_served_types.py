"""`Predictor` with values of other types than in training, with unknown ones, with classes and files of others."""

import datetime
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hostdev
from hostdev.checkpoint import remote
from hostdev.core import cli
from hostdev.core.checksums import checksum, json_checksum
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.forms import INTEGER, Written
from hostdev.data.preprocess.serving import format_texts
from hostdev.ext.predict import cli as predict
from hostdev.ext.predict.rows import as_columns
from hostdev.ext.training import cli as train
from hostdev.models.deepfm import DeepFM

OPTIONS = ["--batch-size", 50, "--emb-dim", 4, "--epochs", 1, "--device", "cpu", "--table-lr", 0.01]


def run(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


def frame_of(n=400):
    """Integer users with missing ones, which determine the label; and a flag."""
    rng = np.random.default_rng(0)
    user = rng.integers(1, 5, n)
    user = pd.Series([None if number == 4 else int(number) for number in user], dtype="Int64")
    label = (user.fillna(4) % 2).astype(int)
    return pd.DataFrame({"u": user, "flag": rng.random(n) < 0.5, "y": label})


def trained(path, write, *more):
    """Make a data set of the file from `write`, and train on it."""
    path.mkdir()
    flags = ["--label", "y", "--categorical", "u,flag", *(more or ("--threshold", 0))]
    assert run(preprocess, "table", write(path), "--out", path / "data", *flags) == 0
    model = ["--model", "deepfm", "--checkpoint-every", 99]
    assert run(train, "--data", path / "data", *OPTIONS, *model, "--run-dir", path / "run") == 0
    return path


def csv(path):
    """Write rows as pandas does after they were floats: 1.0, 2.0 and empty."""
    frame = frame_of()
    frame.astype({"u": "float64"}).to_csv(path / "t.csv", index=False)
    return path / "t.csv"


def parquet(path):
    frame_of().to_parquet(path / "t.parquet")
    return path / "t.parquet"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    return {
        "csv": trained(path / "csv", csv),
        "parquet": trained(path / "parquet", parquet),
        "hashed": trained(path / "hashed", csv, "--hash-buckets", 1000),
    }


@pytest.mark.parametrize("name", ["csv", "parquet", "hashed"])
def test_the_same_probability_whatever_serves_the_rows(runs, name, tmp_path):
    predictor = hostdev.Predictor(runs[name] / "run")
    frame = pd.DataFrame({"u": pd.Series([1, 2, None, 3], dtype="Int64"), "flag": [True, False, True, False]})
    floats = frame.astype({"u": "float64"})
    expected = predictor(frame)
    assert len(set(expected.round(6))) == 4
    text = {"u": ["1.0", "2.0", "", "3.0"], "flag": ["True", "False", "True", "False"]}
    lower = {"u": ["1", "2", None, "3"], "flag": ["true", "false", "true", "false"]}
    table = pa.table({"u": pa.array([1, 2, None, 3], pa.uint16()), "flag": pa.array([1, 0, 1, 0])})
    lists = {"u": [1, 2, None, 3], "flag": [True, False, True, False]}
    for given in (floats, text, lower, table, lists, floats.to_dict("list"), pa.Table.from_pandas(floats)):
        np.testing.assert_array_equal(predictor(given), expected)
    for row in range(4):
        one = {column: values[row] for column, values in lists.items()}
        np.testing.assert_allclose(predictor(one), expected[row : row + 1], rtol=1e-6)
    floats.to_csv(tmp_path / "floats.csv", index=False)
    frame.to_csv(tmp_path / "integers.csv", index=False)
    floats.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    pq.write_table(table, tmp_path / "t.parquet")
    for number, file in enumerate(sorted(tmp_path.iterdir())):
        out = tmp_path / f"p{number}.parquet"
        assert run(predict, "--checkpoint", runs[name] / "run", "--data", file, "--out", out) == 0
        np.testing.assert_allclose(pq.read_table(out)["probability"].to_numpy(), expected, rtol=1e-6)


def test_far_more_out_of_vocabulary_than_in_training_is_a_line(runs, tmp_path, capsys):
    predictor = hostdev.Predictor(runs["csv"] / "run")
    rows = {"u": [f"user {i}" for i in range(30)], "flag": [True] * 30}
    told = (
        "column 'u': 100.0% of 30 values are out of vocabulary, but only 0.0% were in training, "
        "where values were text such"
    )
    with pytest.warns(UserWarning, match=told) as warnings:
        predictor(rows)
        predictor(rows)  # once is enough
    assert len(warnings) == 1
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    options = ["--data", tmp_path / "t.csv", "--out", tmp_path / "p.parquet"]
    capsys.readouterr()
    assert run(predict, "--checkpoint", runs["csv"] / "run", *options) == 0
    assert capsys.readouterr().err.startswith(f"hostdev.predict: warning: {told}")


DAY, NOON = datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2, 12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([DAY, NOON], "column 'u' .*dates and times"),
        ([NOON, NOON.replace(tzinfo=datetime.UTC)], "column 'u' .*with and without a time zone"),
        ([pd.Timestamp("2024-01-02 00:00:00.000000001"), None], "column 'u' has times finer than a microsecond"),
        ([1, 2**53 + 0.0], "row 2, column 'u': 9007199254740992 is a double of 2.53 or more"),
        ([np.datetime64("2024-01-02"), None], "column 'u' is of type date32.day., but its values were of type"),
        ([0.5, 1], "row 1, column 'u': 0.5 is not an integer"),
    ],
)
def test_values_that_arrow_would_change_are_refused(runs, values, message):
    with pytest.raises(hostdev.UserError, match=message):
        hostdev.Predictor(runs["parquet"] / "run")({"u": values, "flag": [True, False]})


def test_integers_of_any_size_are_as_good_in_many_rows_as_in_few(runs):
    predictor = hostdev.Predictor(runs["parquet"] / "run")
    for n in (1, 64, 160):
        expected = predictor({"u": [2**62, 1] * n, "flag": [True] * 2 * n})
        np.testing.assert_array_equal(predictor({"u": [2**64, 1] * n, "flag": [True] * 2 * n}), expected)


def test_arrays_of_arrow_that_are_not_valid(runs):
    """Offsets beyond the text, in a program's own array or table."""
    offsets = pa.py_buffer(np.array([0, 2_000_000_000, 2], np.int32))
    wrong = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab")])
    for rows in (
        {"u": wrong, "flag": [True, False]},
        pa.table({"u": wrong, "flag": [True, False]}),
        pa.RecordBatch.from_arrays([wrong, pa.array([True, False])], names=["u", "flag"]),
    ):
        with pytest.raises(hostdev.UserError, match="column 'u' .*Arrow"):
            hostdev.Predictor(runs["csv"] / "run")(rows)


def test_all_files_are_opened_at_once(runs, tmp_path):
    """The checkpoint may be deleted once a `Predictor` is made."""
    shutil.copytree(runs["csv"] / "run", tmp_path / "run")
    predictor = hostdev.Predictor(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    rows = {"u": [1, 2], "flag": [True, False]}
    np.testing.assert_array_equal(predictor(rows), hostdev.Predictor(runs["csv"] / "run")(rows))


def changed(path, change):
    """Change a checkpoint's manifest, and correct its checksum."""
    file = path / "checkpoint.json"
    content = json.loads(file.read_text())
    del content["sha256"]
    change(content)
    file.write_text(json.dumps({**content, "sha256": json_checksum(content)}))


@pytest.fixture
def copied(runs, tmp_path):
    """A copy of a checkpoint, to change it."""
    source = remote.newest(runs["csv"] / "run").chain[-1].path
    shutil.copytree(source, tmp_path / source.name)
    return tmp_path / source.name


def test_a_module_that_a_checkpoint_names_is_not_imported(copied, capsys):
    """The author of a checkpoint does not decide which code its reader runs."""
    changed(copied, lambda content: content["state"]["more"]["settings"].update(model="this:X"))
    sys.modules.pop("this", None)
    told = f"{copied} has the custom model class 'this:X', and predicting imports its module; if you trust it, name it"
    with pytest.raises(hostdev.UserError) as error:
        hostdev.Predictor(copied)
    assert str(error.value).startswith(told)
    options = ["--data", copied.parent, "--out", copied.parent / "p.parquet"]
    assert run(predict, "--checkpoint", copied, *options) == 2
    assert told in capsys.readouterr().err
    assert "this" not in sys.modules
    rows = {"u": [1], "flag": [True]}
    for model in ("deepfm", DeepFM, "hostdev.models.deepfm:DeepFM"):
        assert hostdev.Predictor(copied, model=model)(rows).shape == (1,)
    with pytest.raises(hostdev.UserError, match="is of a different model"):
        hostdev.Predictor(copied, model="wide_deep")


def vocabulary(change):
    """Return a function that changes a vocabulary's columns."""

    def apply(path):
        file = path / "data/vocabulary.arrow"
        table = pa.ipc.open_file(file.read_bytes()).read_all()
        table = change(table)
        with pa.OSFile(str(file), "wb") as content, pa.ipc.new_file(content, table.schema) as out:
            out.write_table(table)

    return apply


def renamed(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, values)


def wrong_offsets(path):
    """Move the texts' offsets far beyond the file, as no writer would."""
    file = path / "data/vocabulary.arrow"
    content = bytearray(file.read_bytes())
    table = pa.ipc.open_file(pa.py_buffer(bytes(content))).read_all()
    offsets = table["value"].chunk(0).buffers()[1].to_pybytes()[: 4 * (len(table) + 1)]
    at = content.index(offsets)
    content[at + 4 * len(table) : at + 4 * len(table) + 4] = b"\xff\xff\xff\x7f"
    file.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        wrong_offsets,
        vocabulary(lambda table: table.slice(1)),
        vocabulary(lambda table: table.drop_columns("count")),
        vocabulary(lambda table: renamed(table, "count", table["count"].cast(pa.float64()))),
        vocabulary(lambda table: renamed(table, "value", pa.nulls(len(table), pa.string()))),
        vocabulary(lambda table: renamed(table, "value", pa.array(["x"] * len(table)))),
        vocabulary(lambda table: table.take(list(range(len(table)))[::-1])),
        lambda path: (path / "data/vocabulary.arrow").write_bytes(b"ARROW1 and no more"),
    ],
)
def test_a_vocabulary_that_is_wrong_inside(copied, change):
    """With correct checksums: an error of one line, and no crash."""
    change(copied)
    file = copied / "data/vocabulary.arrow"
    manifest = copied / "data/manifest.json"
    content = json.loads(manifest.read_text())
    del content["sha256"]
    content["vocabulary_sha256"] = checksum(file)
    manifest.write_text(json.dumps({**content, "sha256": json_checksum(content)}))

    def sizes(content):
        for other in content["others"]:
            path = copied / other["file"]
            other.update(bytes=path.stat().st_size, sha256=checksum(path))

    changed(copied, sizes)
    with pytest.raises(hostdev.UserError, match="vocabulary.arrow is broken") as error:
        hostdev.Predictor(copied)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["state"]["more"]["settings"].update(batch_size=0),
        lambda content: content["state"]["more"]["settings"].update(emb_dim=2**40),
        lambda content: content["state"]["more"].pop("settings"),
        lambda content: content["state"].update(dense=[1]),
        lambda content: content["tables"][0].update(dim=5),
        lambda content: content["tables"][0].update(rows="many"),
    ],
)
def test_a_manifest_that_is_wrong_inside(copied, change):
    changed(copied, change)
    with pytest.raises(hostdev.UserError, match="is broken") as error:
        hostdev.Predictor(copied)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) <= 500


def test_a_row_of_bags_alone_is_not_two_rows():
    """A list of texts may be one row or several; if that is ambiguous, the column is rejected."""
    separators = {"lists": {"g": None}, "text": {"g": "|"}}
    encodings = {
        name: SimpleNamespace(columns=lambda: ["g"], separators=separator) for name, separator in separators.items()
    }
    columns = lambda name, g: as_columns({"g": g}, encodings[name])["g"]  # noqa: E731
    assert columns("lists", ["1", "2"]) == [["1", "2"]]
    assert columns("lists", [["1"], ["2"]]) == columns("text", [["1"], ["2"]]) == [["1"], ["2"]]
    assert columns("text", ["1|2", "2"]) == ["1|2", "2"]
    assert columns("text", ["1"]) == ["1"]
    with pytest.raises(hostdev.UserError, match="column 'g' has a list of 2 values"):
        columns("text", ["1", "2"])


def test_a_number_with_a_huge_exponent_is_a_value_as_any_other():
    """Once, it was expanded: 11 characters became 100 million."""
    written = Written(frozenset({INTEGER}), ("text",))
    found = format_texts(pa.array(["12", "1e9000000000", "1.2e1", "-1e-9000000000"]), written, hashed=False)
    assert max(len(text or "") for column in [*found.texts, found.fallback] for text in column.to_pylist()) < 100
    assert found.texts[0].to_pylist()[2] == "12"
