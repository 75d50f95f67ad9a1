"""What cannot be: each in one line, exit code 2, and nothing left behind."""

import datetime
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from tests.data.conftest import GOOD


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--label", "z"],
            "good.csv has no column 'z'; it has y, x, c, g, t (from its first line; if that is no header, name the "
            "columns with --columns)",
        ),
        (["--label", "y", "--numeric", "x,zz"], "good.csv has no column 'zz'; it has y, x, c, g, t"),
        (["--label", "y", "--bag", "zz=|"], "good.csv has no column 'zz'; it has"),
        (["--label", "y", "--test-column", "zz=1"], "good.csv has no column 'zz'; it has"),
        (["--label", "y", "--test-after", "zz=1"], "good.csv has no column 'zz'; it has"),
        (
            ["--label", "y", "--numeric", "x,x"],
            "column 'x' is named twice among --label, --weight, --numeric, --categorical and ",
        ),
        (["--label", "y", "--numeric", "c"], "column 'c' is named twice"),
        (["--label", "c"], "column 'c' is named twice"),
        (["--label", "y", "--bag", "c=|"], "column 'c' is named twice"),
        (["--label", "y", "--share", "g=c"], "--share g=c: 'g' is not a column of --categorical or --bag; those are c"),
        (
            ["--label", "y", "--bag", "g=|", "--share", "g=x"],
            "--share g=x: 'x' is not a column of --categorical or --bag",
        ),
        (["--label", "y", "--bag", "g=|", "--share", "g=g"], "--share g=g: a column cannot share its own ids"),
        (
            ["--label", "y", "--bag", "g=|", "--share", "g=c", "--share", "c=g"],
            "--share g=c: 'c' itself shares another column's ids",
        ),
        (
            ["--label", "y", "--bag", "g=|", "--categorical", "t", "--share", "g=c", "--share", "g=t"],
            "--share names the same column twice before =",
        ),
        (["--label", "y", "--share", "g"], "--share g: write it as NAME=VALUE"),
        (["--label", "y", "--test-column", "t"], "--test-column t: write it as NAME=VALUE"),
        (["--label", "y", "--bag", "g="], "--bag g=: the separator is empty"),
        (
            ["--label", "y", "--bag", "g"],
            "good.csv, column 'g': it is of type string, not a list; give the separator of its "
            "values, such as --bag 'g=|'",
        ),
        (
            ["--label", "y", "--numeric", "g"],
            "good.csv:2: column 'g': 'a|b' is not a number; a missing number is empty, NA, or a value given by "
            "--missing; if the column has other values, name the column with --categorical",
        ),
        (
            ["--label", "x"],
            "good.csv:4: column 'x': '2' is not 0 or 1, true or false; give a rule for positive labels,"
            " such as --positive '>3'",
        ),
        (["--label", "g", "--positive", ">3"], "good.csv:2: column 'g': 'a|b' is not a number"),
        (["--label", "y", "--positive", ">three"], "--positive >three: 'three' is not a number"),
        (["--label", "y", "--positive", ">nan"], "--positive >nan: 'nan' is not a number"),
        (["--label", "y", "--test-after", "t=soon"], "--test-after: 'soon' is neither a number nor a date or time"),
        (["--label", "y", "--test-after", "t=nan"], "--test-after: 'nan' is neither a number nor a date or time"),
        (["--label", "y", "--test-after", "t=-nan(ind)"], "--test-after: '-nan(ind)' is neither a number nor a date"),
        (["--label", "y", "--test-after", "g=3"], "good.csv:2: column 'g': 'a|b' is not a number"),
        (["--label", "y", "--test-after", "t=2024-01-01"], "good.csv:2: column 't': '0' is not a time like 2024-01-01"),
        (
            ["--label", "y", "--test-after", "t=100"],
            "none of the 20 rows is in the test split; give more rows or another --test-column or --test-after",
        ),
        (["--label", "y", "--test-column", "t=z"], "none of the 20 rows is in the test split"),
        (
            ["--label", "y", "--test-column", "t=1", "--test-after", "t=3"],
            "--test-column and --test-after both select rows ",
        ),
        (
            ["--label", "y", "--test-fraction", ".1", "--test-after", "t=3"],
            "--test-fraction and --test-after both",
        ),
        (
            ["--label", "y", "--seed", "1", "--test-after", "t=3"],
            "--seed has no effect with --test-after; leave out --seed",
        ),
        (["--label", "y", "--threshold", "1", "--hash-buckets", "9"], "--threshold has no effect with --hash-buckets"),
        (
            ["--label", "y", "--dense", "log"],
            "--dense has no effect without --numeric; leave --dense out, or name numeric columns",
        ),
        (["--label", "y", "--dense", "log", "--numeric", ""], "--dense has no effect without --numeric"),
        (["--label", "y", "--dense", "minmax"], "invalid choice: 'minmax'"),
        (
            ["--label", "y", "--columns", "a,b"],
            "good.csv: the first line has 5 values separated by commas, but --columns names 2 columns",
        ),
        (["--label", "y", "--columns", "y,c,c,d,e"], "--columns has the same name twice"),
        (["--label", "y", "--delimiter", ""], "--delimiter is empty"),
        (
            ["--label", "y", "--delimiter", ";"],
            "good.csv has no column 'y'; it has y,x,c,g,t (a single name, because the first line has no ';'; give "
            "--delimiter ,)",
        ),
        (
            ["--label", "y", "--delimiter", ";", "--columns", "a,b"],
            "the first line has 1 values separated by ';', but --columns names 2 columns; give --delimiter ,",
        ),
        (
            ["--label", "y", "--columns", "y,x,c,g,t"],
            "good.csv: the first row is a header with the names that --columns",
        ),
        (["--label", "y", "--columns", "Y,x,c, g,z"], "leave --columns out"),
        (["--label", "y", "--columns", "y,a,c,d,e"], "good.csv:1: column 'y': 'y' is not 0 or 1"),
        (["--label", "y", "--task", "binary", "--task", "regression"], "--task is given twice, as binary and as"),
        (["--label", "y", "--positive", "1", "--positive=>1"], "--positive is given twice, as 1 and as >1"),
        (["--label", "y", "--test-after", "t=1", "--test-after", "t=2"], "--test-after is given twice, as t=1 and"),
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
        ("y,c\n1,a\n,b\n0,a\n", [], "t.csv:3: column 'y': the value is missing"),
        ("y,c\n1,a\nNA,b\n0,a\n", ["--positive", ">0"], "t.csv:3: column 'y': the value is missing"),
        ("y,c\n1,a\n,b\n0,a\n", ["--positive", "1"], "t.csv:3: column 'y': the value is missing"),
        (
            "y,x,c\n1,5,a\n\n0,five,b\n",
            ["--numeric", "x"],
            "t.csv:3: column 'x': 'five' is not a number; a missing number is empty",
        ),
        ("y,x,c\n1,5,a\n0,inf,b\n", ["--numeric", "x"], "t.csv:3: column 'x': inf is not a finite number"),
        ("y,x,c\n1,5,a\n0,1e999,b\n", ["--numeric", "x"], "t.csv:3: column 'x': inf is not a finite number"),
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
            "t.csv:3: column 't': the value is missing, but --test-after needs a value in every row",
        ),
        ("y,c,c\n1,a,b\n0,a,b\n", [], "t.csv has 2 columns named 'c'"),
        ("y,c\n1,a\n" + "0,b,c\n" * 5, [], "5 rows cannot be read, more than 1% of all; the first is "),
        (
            'y,c\n1,a\n0,"b\n1,c\n',
            [],
            "t.csv, line 3: the quotes that begin here are never closed; if quotes are ordinary"
            " characters, give --no-quotes",
        ),
        ("y::c\n1::a\x1f\n0::b\n", ["--delimiter", "::"], "t.csv: the file contains the character 1F (hexadecimal)"),
    ],
)
def test_wrong_text(refused, tmp_path, text, options, message):
    (tmp_path / "t.csv").write_text(text)
    assert message in refused("t.csv", *options)


def test_the_row_of_a_wrong_value_counts_malformed_ones(refused, tmp_path):
    lines = ["y,c,x", *("1,a,5" for _ in range(1000))]
    lines[3], lines[899], lines[900], lines[901] = "1", "1,2,3,4", "0,b,1e+17", "2"
    lines[950:] = ["1,c,5"] * 50
    (tmp_path / "t.csv").write_text("\n".join(lines))
    message = "t.csv, row 900, column 'x': 1e+17 is "
    assert message in refused("t.csv", columns=("--categorical", "x,c"))


def test_files_with_different_columns(refused, good, tmp_path):
    (tmp_path / "other.csv").write_text("y,x,c,g\n1,2,3,4\n")
    (tmp_path / "other.tsv").write_text("c\tt\ty\tg\tz\n1\t2\t3\t4\t5\n")
    assert (
        refused(good, "other.csv")
        == f"other.csv has different columns than {good}: not in both files: t; make the columns equal"
    )
    assert (
        refused(good, "other.tsv")
        == f"other.tsv has different columns than {good}: not in both files: x, z; make the columns equal"
    )
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
    assert refused("a.parquet", "b.parquet", columns=columns) == f"{line}; cast it in one of the files"
    if "--bag" not in columns:
        assert line in refused("a.parquet", "b.parquet", "--test-column", "t=1")


def test_text_that_is_not_utf8(refused, tmp_path, monkeypatch):
    (tmp_path / "latin.csv").write_bytes("y,c\n1,Étoile\n".encode("latin-1"))
    assert "latin.csv: byte 6 or a byte near it is not UTF-8; give the file's encoding, such as --encoding" in refused(
        "latin.csv"
    )
    (tmp_path / "wide.csv").write_text("y,c\n1,a\n", encoding="utf-16")
    assert refused("wide.csv") == "wide.csv: the file is UTF-16; give --encoding utf-16"
    (tmp_path / "cut.csv").write_bytes("y,c\n1,É".encode()[:-1])
    assert "cut.csv: byte 6 or a byte near it is not UTF-8" in refused("cut.csv")
    lines = b"y,c\n" + b"1,a\n" * 1_000_000 + b"0,\xff\n" + b"1,a\n" * 100_000
    (tmp_path / "late.csv").write_bytes(lines)
    monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", 100_000)
    assert "late.csv: byte 4,000,006 or a byte near it is not UTF-8" in refused("late.csv")


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
    assert "t.csv: a row is longer than 400 bytes; check that commas separate its values" in refused("t.csv")


@pytest.mark.parametrize(("delimiter", "shown"), [(";", "';'"), ("|", "'|'"), ("\t", "tab")])
def test_another_delimiter(refused, tmp_path, delimiter, shown):
    (tmp_path / "t.csv").write_text(GOOD.replace("|", "+").replace(",", delimiter))
    line = refused("t.csv")
    assert line.endswith(f"(a single name, because the first line has no commas; give --delimiter {shown})")


def test_names_that_are_none(refused, good):
    assert refused(good, columns=("--categorical", "a\rb")).startswith("'a\\rb': not a comma-separated list of names")


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        (
            "y, c",
            "it has y, ' c'; ' c' differs only in whitespace: remove the whitespace from the file, or include it in "
            "the name, as '\"",
        ),
        ("y,c ", "it has y, 'c '; 'c ' differs only in whitespace"),
        ("y,d", "it has y, d (from its first line; if that is no header, name the columns with --columns)"),
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


def rows_with(changed):
    rows = [f"{i % 2},v{i % 7},t{i},x" for i in range(400)]
    for number, row in changed.items():
        rows[number] = row
    return "y,c,t,d\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    "changed",
    [
        {10: '1,v3,"open,x', 110: '0,v2,t"shut",x'},  # a row with other columns
        {10: '1,"v3,open,x', 110: '0,v2",shut,x'},  # a value of a column that is read
        {10: '1,v3,"open,x', 110: '0,v2,t",x'},  # a value of a column that is not read
        {10: '1,v3,"open,x', 40: '0,v2,t",x'},
    ],
)
def test_a_quote_that_swallows_rows(refused, tmp_path, changed):
    (tmp_path / "t.csv").write_text(rows_with(changed))
    lines = max(changed) - 10
    message = refused(tmp_path / "t.csv", "--label", "y", label=())
    assert f"t.csv, row 11, a quoted value spans {lines} lines, most of which look like rows" in message
    assert "--no-quotes" in message


def test_long_texts_in_quotes_are_values(tmp_path):
    text = "\n".join(f"line {i}, of a text" for i in range(50))
    (tmp_path / "t.csv").write_text(rows_with({10: f'1,v3,"{text}",x', 12: f'1,"{text}",t,x'}))
    table = TableSource([tmp_path / "t.csv"], TableOptions(label="y", categorical=("c",)))
    assert sum(len(table.parse(block)) for block in table.blocks()) == 400
