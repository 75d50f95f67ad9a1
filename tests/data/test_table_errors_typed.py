"""Typed files that cannot be read as a table: one line each, exit code 2, nothing left behind."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.data.preprocess import cli as preprocess

TABLE = {"y": [0, 1, 1], "c": ["a", "b", "c"], "x": [1.0, 2.5, None]}


@pytest.mark.parametrize(
    ("name", "values", "options", "message"),
    [
        ("c", [{"a": 1}] * 3, [], "it is of type struct<a: int64>, which is nested or unknown; only plain values and"),
        ("c", [[["a"]]] * 3, ["--bag", "c"], "it is of type list<element: list<element: string>>, which is nested"),
        ("c", [["a"]] * 3, [], "it is of type list<element: string>, a list; only --bag and --vector take lists"),
        (
            "x",
            [["a"]] * 3,
            ["--numeric", "x"],
            "it is of type list<element: string>, a list; only --bag and --vector take lists",
        ),
        ("y", [[1]] * 3, [], "it is of type list<element: int64>, a list; only --bag and --vector take lists"),
        ("x", [5, 6, 7], ["--bag", "x"], "it is of type int64, not a list; give the separator of its values"),
        (
            "x",
            [datetime.date(2024, 1, 1)] * 3,
            ["--numeric", "x"],
            "it is of type date32[day], not numbers; name it with",
        ),
        (
            "x",
            [datetime.timedelta(1)] * 3,
            ["--numeric", "x"],
            "it is of type duration[us], which is nested or unknown",
        ),
        (
            "c",
            [1.0, float("nan"), 2.5],
            [],
            "row 3, column 'c': 2.5 is not an integer; categorical values must be",
        ),
        (
            "c",
            [1.0, 1e30, 2.0],
            [],
            "row 2, column 'c': 1e+30 is a double of 2^53 or more, which may represent several",
        ),
        ("c", [1.0, 2.0**53, 2.0], [], "row 2, column 'c': 9007199254740992 is a double of 2^53 or more"),
        ("c", np.array([1, 2, 2**24], np.float32), [], "row 3, column 'c': 16777216 is a float of 2^24 or more"),
        (
            "c",
            ["1.0", "", "9007199254740992.0"],
            [],
            "row 3, column 'c': 9007199254740992.0 is a float of 2^53 or more",
        ),
        (
            "c",
            ["1.0", "", "1.2345678901234568e+18"],
            [],
            "row 3, column 'c': 1.2345678901234568e+18 is a float of 2^53",
        ),
        (
            "c",
            [1.0, float("inf"), 2.0],
            [],
            "row 2, column 'c': inf is not an integer; categorical values must be",
        ),
        ("c", [[1.0], [], [2.0, 2.5]], ["--bag", "c"], "row 3, column 'c': 2.5 is not an integer"),
        ("c", [b"a", b"\xff", b"c"], [], "row 2, column 'c': b'\\xff' is not text in UTF-8"),
        ("x", ["1", "2", "three"], ["--numeric", "x"], ":3: column 'x': 'three' is not a number"),
        ("x", [1.0, float("inf"), 2.0], ["--numeric", "x"], ":2: column 'x': inf is not a finite number"),
        (
            "y",
            [0.0, 1.0, 0.5],
            [],
            ":3: column 'y': '0.5' is not 0 or 1, true or false; give a rule for positive labels",
        ),
        ("y", [0, None, 1], [], ":2: column 'y': the value is missing"),
        ("y", [0.0, float("nan"), 1.0], ["--positive", ">0.5"], ":2: column 'y': the value is missing"),
        ("x", [1.0, None, 2.0], ["--test-after", "x=1"], ":2: column 'x': the value is missing"),
        ("x", [1.0, float("nan"), 2.0], ["--test-after", "x=1"], ":2: column 'x': the value is missing"),
        (
            "x",
            [datetime.date(2024, 1, 1), None, None],
            ["--test-after", "x=2024-01-01"],
            ":2: column 'x': the value is missing",
        ),
        ("x", ["5", "4", "NaN"], ["--test-after", "x=4"], ":3: column 'x': the value is missing"),
        (
            "x",
            [datetime.date(2024, 1, 1)] * 3,
            ["--test-after", "x=5"],
            "--test-after: '5' cannot be compared with a column of type date32[day]; write it like 2024-12-31",
        ),
        (
            "x",
            [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)] * 3,
            ["--test-after", "x=2024-01-01"],
            "cannot be compared with a column of type timestamp[us, tz=UTC]; write it like 2024-12-31T12:00:00Z",
        ),
        (
            "x",
            [datetime.time(12)] * 3,
            ["--test-after", "x=noon"],
            "--test-after: 'noon' cannot be compared with a column of type time64[us]; write it like 12:00:00",
        ),
        ("x", [datetime.time(12)] * 3, ["--test-after", "x=12:00+01:00"], "cannot be compared with a column of"),
        (
            "x",
            [datetime.time(12)] * 3,
            ["--test-after", "x=20240101"],
            "'20240101' cannot be compared with a column of",
        ),
        ("x", [datetime.time(12)] * 3, ["--test-after", "x=25:00"], "'25:00' cannot be compared with a column of type"),
        ("x", [datetime.time(12)] * 3, ["--test-after", "x=12:00.5"], "'12:00.5' cannot be compared with a column of"),
        ("x", [5, 6, 7], ["--test-after", "x=nan(abc)"], "--test-after: 'nan(abc)' is neither a number"),
        ("x", [5, 6, 7], ["--test-after", "x=2024-01-01"], "--test-after: '2024-01-01' is neither a number"),
        (
            "x",
            [datetime.date(2024, 1, 1)] * 3,
            ["--label", "x", "--positive", ">3"],
            "column 'x': it is of type date32[day], and --positive >3 compares numbers; make it a number, or a column "
            "of 0",
        ),
        (
            "x",
            [["a"]] * 3,
            ["--bag", "x", "--test-column", "x=a"],
            "it is of type list<element: string>, a list; choose rows by a column with one value per row",
        ),
        ("x", [[1]] * 3, ["--bag", "x", "--test-after", "x=1"], "a list; choose rows by a column"),
        (
            "x",
            [True, False, True],
            ["--test-after", "x=2024-01-01"],
            "--test-after: '2024-01-01' is neither a number nor",
        ),
        (
            "y",
            [0, 1, 1],
            ["--columns", "y,c,x"],
            "--columns has no effect on t.parquet, which is Parquet; leave out --columns",
        ),
        ("y", [0, 1, 1], ["--delimiter", ","], "--delimiter has no effect on t.parquet"),
        ("y", [0, 1, 1], ["--no-quotes"], "--no-quotes has no effect on t.parquet"),
        ("y", [0, 1, 1], ["--label", "z"], "t.parquet has no column 'z'; it has y, c, x"),
    ],
)
def test_wrong_columns_of_parquet(refused, tmp_path, name, values, options, message):
    pq.write_table(pa.table({**TABLE, name: values}), tmp_path / "t.parquet")
    columns = () if options == ["--bag", "c"] else ("--categorical", "c")
    line = refused("t.parquet", *options, columns=columns, label=() if "--label" in options else ("--label", "y"))
    assert message in line
    assert "t.parquet" in line or line.startswith("--test-after")


def test_what_arrow_does_not_do_is_said_in_a_line(refused, good, tmp_path, monkeypatch, in_process):
    def refuse(array, clean=None):
        raise pa.ArrowNotImplementedError("no kernel")

    monkeypatch.setattr("hostdev.data.preprocess.columns.as_text", refuse)
    line = refused(good, "--positive", ">0")
    assert "good.csv, column 'c': its values, of type string, cannot be read (no kernel); write them as" in line
    arguments = ("--label", "y", "--positive", ">0", "--categorical", "c", "--debug")
    _, _, error = in_process(preprocess, "table", good, "--out", "out", *arguments)
    assert "Traceback" in error
    assert "ArrowNotImplementedError" in error


def test_a_nested_column_that_is_not_used_is_no_matter(tmp_path, in_process):
    pq.write_table(pa.table({**TABLE, "n": [{"a": [1]}] * 3}), tmp_path / "t.parquet")
    code, _, error = in_process(
        preprocess, "table", "t.parquet", "--out", "out", "--label", "y", "--categorical", "c", "--test-column", "c=a"
    )
    assert (code, error) == (0, "")


def test_damaged_files(refused, tmp_path):
    table = pa.table({"y": [0, 1] * 500, "c": [f"value {i}" for i in range(1000)]})
    pq.write_table(table, tmp_path / "t.parquet", compression="none")
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(tmp_path / "t.stream", table.schema) as file:
        file.write_table(table)
    for name, kind in (("t.parquet", "Parquet"), ("t.arrow", "Arrow"), ("t.stream", "Arrow")):
        path = tmp_path / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert f"{name}: the {kind} file is broken (" in refused(name)
        path.write_bytes(content[:6] + b"\0" * 40)
        assert f"{name}: the {kind} file is broken (" in refused(name)
    (tmp_path / "old.feather").write_bytes(b"FEA1" + b"\0" * 40)
    assert "old.feather: this is Feather version 1; write it again" in refused("old.feather")


def test_offsets_that_go_backwards(refused, tmp_path):
    """Texts that can be decoded may still lie where the column says nonsense."""
    offsets = pa.py_buffer(np.array([0, 9, 3, 4], np.int32).tobytes())
    column = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"abcdefghij"))
    table = pa.table({"y": [0, 1, 1], "c": column})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    assert "t.arrow: the " in (told := refused("t.arrow")) and "file is broken (" in told


@pytest.mark.parametrize("name", [b"d", b"\xff"])
def test_a_row_groups_column_has_another_name_than_the_schemas(refused, tmp_path, name):
    """The footer has each name twice. A name that is not UTF-8 was a traceback."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"y": [0, 1] * 5, "c": range(10)}), path)
    content = path.read_bytes()
    path_in_schema = content.rfind(b"\x18\x01c")  # of Thrift's compact protocol: a list with a text of one byte
    path.write_bytes(content[: path_in_schema + 2] + name + content[path_in_schema + 3 :])
    assert pq.read_schema(path).names == ["y", "c"]
    assert "t.parquet: the Parquet file is broken (" in refused("t.parquet")


def test_a_row_groups_column_that_does_not_fit_the_schema(refused, tmp_path):
    """pyarrow's `RowGroupMetaData.column` ends the process with a C++ exception."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"y": [0, 1] * 5, "c": range(10)}), path)
    content = path.read_bytes()
    optional = b"\x15\x04\x25\x02\x18\x01c"  # of the schema in Thrift's compact protocol: int64, optional, "c"
    assert content.count(optional) == 1  # the column's statistics have a histogram of two definition levels
    path.write_bytes(content.replace(optional, optional.replace(b"\x02", b"\x00")))
    assert not pq.read_schema(path).field("c").nullable
    assert "t.parquet: the Parquet file is broken (" in refused("t.parquet")
