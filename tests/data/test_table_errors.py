"""What cannot be: each in one line, exit code 2, and nothing left behind."""

import datetime
import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.commands import preprocess
from hostdev.data import manifest

GOOD = "y,x,c,g,t\n" + "".join(f"{i % 2},{i},v{i % 3},a|b,{i}\n" for i in range(20))


@pytest.fixture
def refused(tmp_path, in_process):
    """Run `preprocess table`, which must refuse; return its line."""

    def run(*arguments, label=("--label", "y"), columns=("--categorical", "c")):
        before = sorted(path.name for path in tmp_path.iterdir())
        code, out, error = in_process(preprocess, "table", *arguments, "--out", "out", *label, *columns)
        assert code == 2
        assert out == ""
        assert error.count("\n") == 1
        assert error.startswith("hostdev.data.preprocess: error: ")
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return error.removeprefix("hostdev.data.preprocess: error: ").strip()

    return run


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.csv"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--label", "z"],
            "good.csv has no column 'z'; it has y, x, c, g, t (from its first line; if that is a row, give --columns)",
        ),
        (["--label", "y", "--numeric", "x,zz"], "good.csv has no column 'zz'; it has y, x, c, g, t"),
        (["--label", "y", "--bag", "zz=|"], "good.csv has no column 'zz'; it has"),
        (["--label", "y", "--test-column", "zz=1"], "good.csv has no column 'zz'; it has"),
        (["--label", "y", "--test-after", "zz=1"], "good.csv has no column 'zz'; it has"),
        (
            ["--label", "y", "--numeric", "x,x"],
            "column 'x' is named twice among --label, --numeric, --categorical and ",
        ),
        (["--label", "y", "--numeric", "c"], "column 'c' is named twice"),
        (["--label", "c"], "column 'c' is named twice"),
        (["--label", "y", "--bag", "c=|"], "column 'c' is named twice"),
        (["--label", "y", "--share", "g=c"], "--share g=c: 'g' is not a column of --categorical or --bag, which are c"),
        (
            ["--label", "y", "--bag", "g=|", "--share", "g=x"],
            "--share g=x: 'x' is not a column of --categorical or --bag",
        ),
        (["--label", "y", "--bag", "g=|", "--share", "g=g"], "--share g=g: 'g' has no ids of its own"),
        (
            ["--label", "y", "--bag", "g=|", "--share", "g=c", "--share", "c=g"],
            "--share g=c: 'c' has no ids of its own",
        ),
        (
            ["--label", "y", "--bag", "g=|", "--categorical", "t", "--share", "g=c", "--share", "g=t"],
            "--share names a column twice",
        ),
        (["--label", "y", "--share", "g"], "--share g: write it as NAME=VALUE"),
        (["--label", "y", "--test-column", "t"], "--test-column t: write it as NAME=VALUE"),
        (["--label", "y", "--bag", "g="], "--bag g=: the separator is empty"),
        (
            ["--label", "y", "--bag", "g"],
            "good.csv, column 'g': it is of type string, not a list; say what separates its "
            "values, such as --bag 'g=|'",
        ),
        (
            ["--label", "y", "--numeric", "g"],
            "good.csv, row 1, column 'g': 'a|b' is not a number; name the column with "
            "--categorical, or fix the value (a missing one is empty or NA)",
        ),
        (
            ["--label", "x"],
            "good.csv, row 3, column 'x': '2' is not 0 or 1, true or false; say which labels are positive,"
            " such as --positive '>3'",
        ),
        (["--label", "g", "--positive", ">3"], "good.csv, row 1, column 'g': 'a|b' is not a number"),
        (["--label", "y", "--positive", ">three"], "--positive >three: 'three' is not a number"),
        (["--label", "y", "--positive", ">nan"], "--positive >nan: 'nan' is not a number"),
        (["--label", "y", "--test-after", "t=soon"], "--test-after: 'soon' is not a number, and not a date or time"),
        (["--label", "y", "--test-after", "t=nan"], "--test-after: 'nan' is not a number, and not a date or time"),
        (["--label", "y", "--test-after", "t=-nan(ind)"], "--test-after: '-nan(ind)' is not a number, and not a date"),
        (["--label", "y", "--test-after", "g=3"], "good.csv, row 1, column 'g': 'a|b' is not a number"),
        (["--label", "y", "--test-after", "t=2024-01-01"], "row 1, column 't': '0' is not a time like 2024-01-01"),
        (
            ["--label", "y", "--test-after", "t=100"],
            "none of the 20 rows is in the test split; give more rows or another --test-column or --test-after",
        ),
        (["--label", "y", "--test-column", "t=z"], "none of the 20 rows is in the test split"),
        (
            ["--label", "y", "--test-column", "t=1", "--test-after", "t=3"],
            "--test-column and --test-after both say which ",
        ),
        (["--label", "y", "--test-fraction", ".1", "--test-after", "t=3"], "--test-fraction and --test-after both say"),
        (
            ["--label", "y", "--seed", "1", "--test-after", "t=3"],
            "--seed has no effect with --test-after; leave it out",
        ),
        (["--label", "y", "--threshold", "1", "--hash-buckets", "9"], "--threshold has no effect with --hash-buckets"),
        (
            ["--label", "y", "--dense", "log"],
            "--dense has no effect without --numeric; leave it out, or name the columns",
        ),
        (["--label", "y", "--dense", "log", "--numeric", ""], "--dense has no effect without --numeric"),
        (["--label", "y", "--dense", "minmax"], "invalid choice: 'minmax'"),
        (
            ["--label", "y", "--columns", "a,b"],
            "good.csv: the first line has 5 values between commas, but --columns names 2 columns",
        ),
        (["--label", "y", "--columns", "y,c,c,d,e"], "--columns names a column twice"),
        (["--label", "y", "--delimiter", ""], "--delimiter is empty"),
        (
            ["--label", "y", "--delimiter", ";"],
            "good.csv has no column 'y'; it has y,x,c,g,t (one name, as no ';' are in"
            " its first line; give --delimiter ,)",
        ),
        (
            ["--label", "y", "--delimiter", ";", "--columns", "a,b"],
            "the first line has 1 values between ';', but --columns names 2 columns; give --delimiter ,",
        ),
        (["--label", "y", "--columns", "y,x,c,g,t"], "good.csv, row 1, column 'y': 'y' is not 0 or 1"),
        ([], "the following arguments are required: --label"),
    ],
)
def test_wrong_options(refused, good, options, message):
    assert message in refused(good, *options, label=())


def test_options_in_no_encoding(refused, good):
    for options in (["--delimiter", "\udce9"], ["--test-column", "c=\udce9"], ["--bag", "g=\udce9"]):
        assert refused(good, *options) == f"{options[0]} {options[1]!r} is not text in UTF-8"


def test_no_column_with_ids(refused, good):
    assert refused(good, columns=("--numeric", "x")) == (
        "no column has ids; name at least one with --categorical or --bag"
    )


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", [], "t.csv: the file is empty"),
        ("\n\n", [], "t.csv: the file is empty"),
        ("y,c\n", [], "the input has no rows"),
        ("y,c", [], "the input has no rows"),
        ("y,c\n1,a\n,b\n0,a\n", [], "t.csv, row 2, column 'y': it is missing"),
        ("y,c\n1,a\nNA,b\n0,a\n", ["--positive", ">0"], "t.csv, row 2, column 'y': it is missing"),
        ("y,c\n1,a\n,b\n0,a\n", ["--positive", "1"], "t.csv, row 2, column 'y': it is missing"),
        ("y,x,c\n1,5,a\n\n0,five,b\n", ["--numeric", "x"], "t.csv, row 2, column 'x': 'five' is not a number; name"),
        ("y,x,c\n1,5,a\n0,inf,b\n", ["--numeric", "x"], "t.csv, row 2, column 'x': inf is not a finite number"),
        ("y,x,c\n1,5,a\n0,1e999,b\n", ["--numeric", "x"], "t.csv, row 2, column 'x': inf is not a finite number"),
        (
            "y,x,c\n1,1e-9,a\n0,1,b\n1,1e300,b\n",
            ["--numeric", "x", "--test-after", "x=0.5"],
            "column 'x': a number is inf when scaled, which float32 cannot hold; leave such rows out, or use --dense "
            "log",
        ),
        (
            "y,x,c\n1,1e300,a\n0,-1e300,b\n1,3,t\n",
            ["--numeric", "x", "--test-column", "c=t", "--dense", "standard"],
            "column 'x' has numbers too large for --dense standard; use --dense log",
        ),
        (
            "y,t,c\n1,5,a\n0,,b\n",
            ["--test-after", "t=3"],
            "t.csv, row 2, column 't': it is missing, so that its row is neither before nor after",
        ),
        ("y,c,c\n1,a,b\n0,a,b\n", [], "t.csv has 2 columns named 'c'"),
        ("y,c\n1,a\n" + "0,b,c\n" * 5, [], "5 lines are malformed, more than 1% of all; the first is "),
        (
            'y,c\n1,a\n0,"b\n1,c\n',
            [],
            "t.csv, line 3: the quotes that begin here are never closed; if quotes are ordinary"
            " characters, give --no-quotes",
        ),
        ("y::c\n1::a\x1f\n0::b\n", ["--delimiter", "::"], "t.csv: the file has the character 1F (hexadecimal)"),
    ],
)
def test_wrong_text(refused, tmp_path, text, options, message):
    (tmp_path / "t.csv").write_text(text)
    assert message in refused("t.csv", *options)


def test_the_row_of_a_wrong_value_counts_malformed_ones(refused, tmp_path):
    lines = ["y,c,x", *("1,a,5" for _ in range(1000))]
    lines[3], lines[899], lines[900], lines[901] = "1", "1,2,3,4", "0,b,?", "2"
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert "t.csv, row 900, column 'x': '?' is not a number" in refused("t.csv", "--numeric", "x")


def test_files_with_different_columns(refused, good, tmp_path):
    (tmp_path / "other.csv").write_text("y,x,c,g\n1,2,3,4\n")
    (tmp_path / "other.tsv").write_text("c\tt\ty\tg\tz\n1\t2\t3\t4\t5\n")
    assert refused(good, "other.csv") == f"other.csv has other columns than {good}: only one of them has t"
    assert refused(good, "other.tsv") == f"other.tsv has other columns than {good}: only one of them has x, z"
    assert "nowhere.csv: no such file" in refused(good, "nowhere.csv")


TIMES = [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2)]


@pytest.mark.parametrize(
    ("values", "one", "other"),
    [
        (TIMES, pa.timestamp("us"), pa.timestamp("ns")),
        (TIMES, pa.date32(), pa.timestamp("s")),
        (TIMES, pa.timestamp("us"), pa.timestamp("us", "UTC")),
        ([0, 1], pa.decimal128(22, 2), pa.decimal128(22, 0)),
        ([0, 1], pa.int8(), pa.bool_()),
        ([0, 1], pa.list_(pa.int8()), pa.list_(pa.bool_())),
    ],
)
def test_files_that_write_a_value_otherwise(refused, tmp_path, values, one, other):
    for name, kind in (("a", one), ("b", other)):
        array = pa.array([[v] if pa.types.is_list(kind) else v for v in values])
        pq.write_table(pa.table({"y": [0, 1], "t": array.cast(kind), "c": ["a", "b"]}), tmp_path / f"{name}.parquet")
    columns = ("--bag", "t") if pa.types.is_list(one) else ("--categorical", "t")
    one, other = (pq.read_schema(tmp_path / f"{name}.parquet").field("t").type for name in "ab")
    line = f"column 't' is of type {one} in a.parquet and {other} in b.parquet, so equal values would get different ids"
    assert refused("a.parquet", "b.parquet", columns=columns) == f"{line}; cast it in one of them"
    if "--bag" not in columns:
        assert line in refused("a.parquet", "b.parquet", "--test-column", "t=1")


def test_text_that_is_not_utf8(refused, tmp_path, monkeypatch):
    (tmp_path / "latin.csv").write_bytes("y,c\n1,Étoile\n".encode("latin-1"))
    assert "latin.csv: byte 6 or near is not UTF-8; convert the file, such as with iconv" in refused("latin.csv")
    (tmp_path / "wide.csv").write_text("y,c\n1,a\n", encoding="utf-16")
    assert refused("wide.csv") == "wide.csv: the file is UTF-16; convert it to UTF-8"
    (tmp_path / "cut.csv").write_bytes("y,c\n1,É".encode()[:-1])
    assert "cut.csv: byte 6 or near is not UTF-8" in refused("cut.csv")
    lines = b"y,c\n" + b"1,a\n" * 1_000_000 + b"0,\xff\n" + b"1,a\n" * 100_000
    (tmp_path / "late.csv").write_bytes(lines)
    monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", 100_000)
    assert "late.csv: byte 4,000,006 or near is not UTF-8" in refused("late.csv")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (pa.string(), ["--bag", "t=|"]),
        (pa.string(), ["--bag", "c=|", "--categorical", "t"]),
        (pa.string(), ["--bag", "c=|", "--numeric", "t"]),
        (pa.string(), ["--bag", "c=|", "--test-column", "t=1"]),
        (pa.string(), ["--bag", "c=|", "--label", "t", "--positive", "1"]),
        (pa.large_string(), ["--bag", "t=|"]),
        (pa.list_(pa.string()), ["--bag", "t"]),
    ],
)
def test_text_in_parquet_that_is_not_utf8(refused, tmp_path, monkeypatch, kind, options):
    """Arrow's reader takes the bytes as they are."""
    monkeypatch.setattr("hostdev.data.preprocess.files.CHUNK_ROWS", 3)
    texts = [b"1", b"2", b"1", b"2", b"\xffb", b"2"]
    if pa.types.is_list(kind):
        found = pa.ListArray.from_arrays([0, 2, 2, 3, 4, 5, 6], pa.array(texts).view("string"))
    else:
        found = pa.array(texts, pa.large_binary() if kind == pa.large_string() else pa.binary()).view(kind)
    pq.write_table(pa.table({"y": [0, 1] * 3, "c": ["x"] * 6, "t": found}), tmp_path / "t.parquet")
    line = refused("t.parquet", *options, columns=(), label=() if "--label" in options else ("--label", "y"))
    assert line == "t.parquet, row 5, column 't': b'\\xffb' is not text in UTF-8"


def test_compressed_text_that_is_none(refused, tmp_path):
    whole = gzip.compress(GOOD.encode() * 1000)
    for size in (len(whole) // 2, len(whole) - 1):
        (tmp_path / "half.csv.gz").write_bytes(whole[:size])
        assert "half.csv.gz: the file cannot be read (" in refused("half.csv.gz")


def test_a_row_that_is_too_long(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", 100)
    (tmp_path / "t.csv").write_text("y,c\n" + "1,a\n" * 30 + "1," + "b" * 500 + "\n")
    assert "t.csv: a row is longer than 400 bytes; are there commas between values, and quotes as in CSV?" in refused(
        "t.csv"
    )


TABLE = {"y": [0, 1, 1], "c": ["a", "b", "c"], "x": [1.0, 2.5, None]}


@pytest.mark.parametrize(
    ("name", "values", "options", "message"),
    [
        ("c", [{"a": 1}] * 3, [], "it is of type struct<a: int64>, which is nested or unknown; only plain values and"),
        ("c", [[["a"]]] * 3, ["--bag", "c"], "it is of type list<element: list<element: string>>, which is nested"),
        ("c", [["a"]] * 3, [], "it is of type list<element: string>, a list; only --bag takes lists"),
        ("x", [["a"]] * 3, ["--numeric", "x"], "it is of type list<element: string>, a list; only --bag takes lists"),
        ("y", [[1]] * 3, [], "it is of type list<element: int64>, a list; only --bag takes lists"),
        ("x", [5, 6, 7], ["--bag", "x"], "it is of type int64, not a list; say what separates its values"),
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
            "row 3, column 'c': 2.5 is not a whole number; a categorical value is one, or",
        ),
        (
            "c",
            [1.0, 1e30, 2.0],
            [],
            "row 2, column 'c': 1e+30 is a double of 2^53 or more, which may stand for several",
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
            "row 2, column 'c': inf is not a whole number; a categorical value is one, or",
        ),
        ("c", [[1.0], [], [2.0, 2.5]], ["--bag", "c"], "row 3, column 'c': 2.5 is not a whole number"),
        ("c", [b"a", b"\xff", b"c"], [], "row 2, column 'c': b'\\xff' is not text in UTF-8"),
        ("x", ["1", "2", "three"], ["--numeric", "x"], "row 3, column 'x': 'three' is not a number"),
        ("x", [1.0, float("inf"), 2.0], ["--numeric", "x"], "row 2, column 'x': inf is not a finite number"),
        (
            "y",
            [0.0, 1.0, 0.5],
            [],
            "row 3, column 'y': '0.5' is not 0 or 1, true or false; say which labels are positive",
        ),
        ("y", [0, None, 1], [], "row 2, column 'y': it is missing"),
        ("y", [0.0, float("nan"), 1.0], ["--positive", ">0.5"], "row 2, column 'y': it is missing"),
        ("x", [1.0, None, 2.0], ["--test-after", "x=1"], "row 2, column 'x': it is missing"),
        ("x", [1.0, float("nan"), 2.0], ["--test-after", "x=1"], "row 2, column 'x': it is missing"),
        ("x", [datetime.date(2024, 1, 1), None, None], ["--test-after", "x=2024-01-01"], "row 2, column 'x': it is"),
        ("x", ["5", "4", "NaN"], ["--test-after", "x=4"], "row 3, column 'x': it is missing"),
        (
            "x",
            [datetime.date(2024, 1, 1)] * 3,
            ["--test-after", "x=5"],
            "--test-after: '5' cannot be compared with a column of type date32[day]; write it as 2024-12-31",
        ),
        (
            "x",
            [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)] * 3,
            ["--test-after", "x=2024-01-01"],
            "cannot be compared with a column of type timestamp[us, tz=UTC]; write it as 2024-12-31T12:00:00Z",
        ),
        (
            "x",
            [datetime.time(12)] * 3,
            ["--test-after", "x=noon"],
            "--test-after: 'noon' cannot be compared with a column of type time64[us]; write it as 12:00:00",
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
        ("x", [5, 6, 7], ["--test-after", "x=nan(abc)"], "--test-after: 'nan(abc)' is not a number"),
        ("x", [5, 6, 7], ["--test-after", "x=2024-01-01"], "--test-after: '2024-01-01' is not a number"),
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
            "it is of type list<element: string>, a list; --test-column and --test-after take a column with one "
            "value per row",
        ),
        ("x", [[1]] * 3, ["--bag", "x", "--test-after", "x=1"], "a list; --test-column and --test-after take a column"),
        (
            "x",
            [True, False, True],
            ["--test-after", "x=2024-01-01"],
            "--test-after: '2024-01-01' is not a number, and not",
        ),
        (
            "y",
            [0, 1, 1],
            ["--columns", "y,c,x"],
            "--columns has no effect on t.parquet, which is Parquet; leave it out",
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


@pytest.mark.parametrize(("delimiter", "shown"), [(";", "';'"), ("|", "'|'"), ("\t", "tab")])
def test_another_delimiter(refused, tmp_path, delimiter, shown):
    (tmp_path / "t.csv").write_text(GOOD.replace("|", "+").replace(",", delimiter))
    line = refused("t.csv")
    assert line.endswith(f"(one name, as no commas are in its first line; give --delimiter {shown})")


def test_names_that_are_none(refused, good):
    assert refused(good, columns=("--categorical", "a\rb")).startswith("'a\\rb': not a list of names with commas")


def test_what_arrow_does_not_do_is_said_in_a_line(refused, good, tmp_path, monkeypatch, in_process):
    def refuse(array):
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


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        (
            "y, c",
            "it has y, ' c'; ' c' differs by blanks: take them out of the file, or give the name with them, as '\" c",
        ),
        ("y,c ", "it has y, 'c '; 'c ' differs by blanks"),
        ("y,d", "it has y, d (from its first line; if that is a row, give --columns)"),
    ],
)
def test_blanks_around_names_are_seen(refused, tmp_path, header, hint):
    (tmp_path / "t.csv").write_text(f"{header}\n0,a\n1,b\n")
    line = refused("t.csv")
    assert hint in line
    assert "t.csv has no column 'c'; " in line


def test_a_name_with_blanks_can_be_given_as_it_is(tmp_path, in_process):
    (tmp_path / "t.csv").write_text("y, c\n" + "".join(f"{i % 2}, v{i % 3}\n" for i in range(60)))
    flags = ["--label", "y", "--categorical", '" c"', "--out", tmp_path / "out"]
    assert in_process(preprocess, "table", tmp_path / "t.csv", *flags)[0] == 0
    assert manifest.read(tmp_path / "out").schema.ids == (" c",)


def test_many_and_long_names_and_types_make_short_lines(refused, tmp_path):
    names = [f"column {i} " + "x" * 300 for i in range(900)]
    (tmp_path / "t.csv").write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    assert len(refused("t.csv")) < 500
    struct = pa.struct([(name, pa.int64()) for name in names])
    pq.write_table(pa.table({"y": [0, 1], "c": pa.nulls(2, struct)}), tmp_path / "t.parquet")
    line = refused("t.parquet")
    assert "it is of type struct<column 0 xxx" in line
    assert len(line) < 500
