"""Values served as another type than in training: the ids of training, or an error that names the column."""

import dataclasses

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.unlabelled import rows_in
from tests.data import pairs


def not_found(found):
    return [
        (group, trained, served, what)
        for group, rows in found.items()
        for trained, cells in rows.items()
        for served, what in cells.items()
        if what not in ("same", "refused")
    ]


def test_the_document_is_what_is_found(tmp_path):
    """Each type and each kind of file, trained and served as each other one: docs/reference/value-types.md."""
    found = pairs.matrix(tmp_path / "a")
    assert not_found(found) == []
    for rows in found.values():
        assert all(cells[name] == "same" for name, cells in rows.items())
    assert pairs.DOCUMENT.read_text() == pairs.document(found, pairs.carriers(tmp_path, pairs.carried()))


def test_hash_buckets_and_older_data_sets(tmp_path):
    """Without a vocabulary, and where the manifest does not say how values were written, nothing is another value."""
    assert not_found(pairs.matrix(tmp_path / "a", hash_buckets=2**40)) == []
    assert not_found(pairs.matrix(tmp_path / "b", forget=True)) == []


def encoding_of(tmp_path, columns, *options):
    """Return how a data set of columns, all for training and for testing, encodes rows."""
    pq.write_table(pairs.labelled(columns), tmp_path / "t.parquet")
    return made(tmp_path, tmp_path / "t.parquet", list(columns), *options)


def made(tmp_path, path, columns, *options):
    names = [f"--bag={name}=|" if name.startswith("bag") else f"--categorical={name}" for name in columns]
    arguments = ["table", path, "--out", tmp_path / "data", "--label", "y", "--test-column", "split=test", *names]
    threshold = () if {"--hash-buckets", "--threshold"} & {*options} else ("--threshold", 0)
    preprocess.main([*map(str, [*arguments, *threshold, *options])])
    found = manifest.read(tmp_path / "data")
    return Encoding(found, found.vocabulary and tmp_path / "data" / found.vocabulary)


def ids(encoding, **columns):
    return encoding.encode(pa.RecordBatch.from_pydict(columns)).ids[:, 0].tolist()


def test_what_pandas_makes_of_whole_numbers_with_a_missing_one(tmp_path):
    """to_csv writes 1.0, 2.0 and nothing: they are the values 1, 2 and missing, whoever serves them."""
    frame = pd.DataFrame({"u": [1, 2, None, 3] * 2, "y": [0, 1] * 4})
    both = pd.concat([frame.assign(split="train"), frame.assign(split="test")])
    both.to_csv(tmp_path / "t.csv", index=False)
    encoding = made(tmp_path, tmp_path / "t.csv", ["u"])
    assert manifest.read(tmp_path / "data").kinds == {"u": {"types": ["text"], "forms": ["", "1.0"]}}
    expected = ids(encoding, u=["1.0", "2.0", "", "3.0"])
    assert len(set(expected)) == 4
    for served in ([1, 2, None, 3], [1.0, 2.0, None, 3.0], ["1", "2", "", "3"], pa.array([1, 2, None, 3], pa.uint8())):
        assert ids(encoding, u=served) == expected
    assert encoding.plain.encode({"u": [1, None]}) is None
    assert ids(encoding, u=[4]) == [encoding.schema.spaces[0].oov]


@pytest.mark.parametrize("options", [(), ("--hash-buckets", 97)])
@pytest.mark.parametrize(
    ("trained", "served", "left"),
    [
        (["a", "", "ä", "a"] * 2, ["ä", "new", "", "a", None], [["\ud800"], [2.5]]),
        ([1, 2, -3, 2] * 2, [2, 17, -3, "1"], [["01"], ["1.0"], [""], [True]]),
        (["1", "x", "2", "2"] * 2, [1, "x", "01"], [[1.0]]),
    ],
)
def test_a_few_values_have_the_ids_of_many(tmp_path, options, trained, served, left):
    """The quick way for a few rows finds the same ids; it leaves values that may have been written otherwise."""
    encoding = encoding_of(tmp_path, {"u": pa.array(trained)}, *options)
    found = [encoding.plain.encode({"u": [value]}) for value in served]
    if options:  # without them, an unknown number is left, too
        assert all(found)
    for value, batch in zip(served, found, strict=True):
        assert batch is None or batch.ids[:, 0].tolist() == ids(encoding, u=[value])
    assert not any(encoding.plain.encode({"u": each}) for each in left)


def test_bags(tmp_path):
    """Their values, in lists or in text, are found as those of other columns; missing ones are left out."""
    text = pa.array(["1.0|2.0", "", "3.0"] + ["1.0"] * 5)
    encoding = encoding_of(tmp_path, {"bag": text})
    values = lambda served: encoding.encode(pa.RecordBatch.from_pydict({"bag": served})).bags["bag"]  # noqa: E731
    found, lengths = values(text)
    assert lengths.tolist() == [2, 0, 1] + [1] * 5
    for served in (
        [[1, 2], [], [3]] + [[1]] * 5,
        ["1|2", "", "3"] + ["1"] * 5,
        [[1.0, None, 2.0], [None], [3.0]] + [[1.0]] * 5,
    ):
        again, of_each = values(served)
        assert again.tolist() == found.tolist()
        assert of_each.tolist() == lengths.tolist()


@pytest.mark.parametrize(
    ("trained", "served", "message"),
    [
        (["yes", "no"], [True, False], "column 'u' is of type bool, but its values were text in training"),
        (["a", "b"], pa.array([1], pa.date32()), "column 'u' is of type date32.* were text in training"),
        (
            pa.array([1, 2]),
            pa.array([1, 2], pa.timestamp("s")),
            r"column 'u' is of type timestamp\[s\], but its values were of type int64 in training",
        ),
        (pa.array([1, 2]), [2.0**53], "row 1, column 'u': 9007199254740992 is a double of 2.53 or more"),
        (pa.array([1, 2]), pa.array([2**24], pa.float32()), "row 1, column 'u': 16777216 is a float of 2.24 or more"),
        (pa.array([1, 2]), ["9.007199254740993e+15", "1e+16"], "row 2, column 'u': 1e.16 is a float of 2.53 or more"),
        (pa.array([True, False]), [1, 2], "row 2, column 'u': 2 is neither true nor false"),
        (pa.array([True, False]), ["true", "yes"], "row 2, column 'u': 'yes' is not true or false"),
        (pa.array([1, 2], pa.date32()), ["01/02/2024"], "row 1, column 'u': '01/02/2024' is not a date or time"),
        (
            pa.array([1, 2], pa.date32()),
            pa.array([1], pa.timestamp("s")),
            "has a time, but the column's values were dates in",
        ),
        (
            pa.array([1, 2], pa.timestamp("s")),
            pa.array([1], pa.timestamp("s", "UTC")),
            r"column 'u' is of type timestamp\[s, tz=UTC\], with a time zone, but the column's values had no time zone",
        ),
        (["1", "1.0"], [1], "row 1, column 'u': 1 was written in several ways in training, each with its own id"),
        (["007", "7"], [7], "row 1, column 'u': 7 was written in several ways in training"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, trained, served, message):
    half = pa.array(trained)
    columns = {"u": pa.concat_arrays([half] * (pairs.ROWS // len(half)))}
    with pytest.raises(UserError, match=message) as error:
        ids(encoding_of(tmp_path, columns), u=served)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (pa.array(["1.0", "2.0"]), pa.array([1, 2]), "the column has text such as '1.0', but column 'u' is int64 in"),
        (pa.array(["07", "2"]), pa.array([1, 2]), "the column has text such as '07', but column 'u' is int64 in"),
    ],
)
def test_text_of_floats_beside_integers_is_two_values(refused_files, first, second, message):
    assert message in refused_files(first, second)


@pytest.fixture
def refused_files(tmp_path):
    def line(*columns):
        paths = []
        for number, column in enumerate(columns):
            paths.append(tmp_path / f"{number}.parquet")
            pq.write_table(pa.table({"u": column, "y": [0, 1]}), paths[-1])
        with pytest.raises(UserError) as error:
            preprocess.main(
                ["table", *map(str, paths), "--out", str(tmp_path / "data"), "--label", "y", "--categorical", "u"]
            )
        return str(error.value)

    return line


def test_two_files_of_text_that_write_numbers_otherwise(tmp_path, capsys):
    for name, text in (("a", "1.0"), ("b", "1")):
        (tmp_path / f"{name}.csv").write_text("u,y,split\n" + f"{text},0,train\n,1,test\n" * 2)
    arguments = ["table", tmp_path, "--out", tmp_path / "data", "--label", "y", "--categorical", "u"]
    preprocess.main([*map(str, [*arguments, "--test-column", "split=test"])])
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("column"))
    files = [tmp_path / name for name in ("b.csv", "a.csv")]
    assert line == (
        f"column 'u' has numbers such as '1' in {files[0]} and '1.0' in {files[1]}, which are different values; "
        "write them the same way if they should be equal"
    )


def test_columns_that_share_their_ids_have_one_type(tmp_path):
    times = {"u": pa.array([1, 2], pa.timestamp("us")), "v": pa.array([1, 2], pa.timestamp("ms")), "y": [0, 1]}
    pq.write_table(pa.table(times), tmp_path / "t.parquet")
    options = ["--label", "y", "--categorical", "u,v", "--share", "v=u", "--out", str(tmp_path / "data")]
    with pytest.raises(UserError, match="columns 'u' and 'v' share their ids, and are of type"):
        preprocess.main(["table", str(tmp_path / "t.parquet"), *options])


def test_truth_values_as_numbers_and_a_header_with_blanks(tmp_path):
    """In text as in Parquet; and a header says what is wrong with it."""
    rows = "".join(f"{i % 2},a,{'True' if i % 3 else 'false'},{'train' if i < 8 else 'test'}\n" for i in range(12))
    (tmp_path / "t.csv").write_text("y,u,n,split\n" + rows)
    encoding = made(tmp_path, tmp_path / "t.csv", ["u"], "--numeric", "n")
    column = lambda n: encoding.encode(pa.RecordBatch.from_pydict({"u": ["a"] * 3, "n": n})).dense[:, 0].tolist()  # noqa: E731
    assert column(["True", "FALSE", ""]) == column([True, False, None]) == column([1, 0, None]) == [1, 0, 0]
    (tmp_path / "blanks.csv").write_text("u, n\na,1\n")
    with pytest.raises(UserError, match="has no column 'n'; it has u, ' n'; ' n' differs only in whitespace: remove"):
        rows_in(tmp_path / "blanks.csv", encoding, {"preset": "table"})


def test_a_column_without_a_frequent_value(tmp_path):
    encoding = encoding_of(tmp_path, {"u": pa.array(list("abcdefgh")), "v": pa.array([1] * 8)}, "--threshold", 3)
    batch = encoding.encode(pa.RecordBatch.from_pydict({"u": ["a", "zz"], "v": [1.0, 2.0]}))
    spaces = encoding.schema.spaces
    assert batch.ids.tolist() == [[spaces[0].oov, spaces[1].first], [spaces[0].oov, spaces[1].oov]]


def test_missing_values_that_are_words(tmp_path):
    """NaN in text beside numbers is the missing value of a frame."""
    encoding = encoding_of(tmp_path, {"u": pa.array(["1.0", "NaN"] * 4)})
    assert ids(encoding, u=[1, None]) == ids(encoding, u=["1.0", "NaN"])
    assert len(set(ids(encoding, u=[1, None]))) == 2


@pytest.mark.parametrize("kinds", [[], {"u": 3}, {"u": {"types": ["text"]}}, {"u": {"types": "text", "forms": []}}])
def test_kinds_that_no_manifest_has(tmp_path, kinds):
    encoding_of(tmp_path, {"u": pa.array(["a"] * 8)})
    dataclasses.replace(manifest.read(tmp_path / "data"), kinds=kinds).write(tmp_path / "data")
    if kinds:
        with pytest.raises(UserError, match="manifest.json is broken .*kinds"):
            manifest.read(tmp_path / "data")
