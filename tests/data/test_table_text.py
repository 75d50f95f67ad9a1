"""Tables in text: delimiters, headers, quotes, malformed lines, names."""

import os

import pytest

from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.build import Options
from tests.data import twins
from tests.data.test_table import column_of, write


@pytest.mark.parametrize(
    ("name", "text", "how"),
    [
        ("t.dat", '1::a b::x|y::0\n0::c:d::::1\n1::"q::y::0\n', {"columns": ("y", "c", "g", "s"), "delimiter": "::"}),
        ("t.txt", 'y\tc\tg\ts\n1\ta b\tx|y\t0\n0\tc:d\t\t1\n1\t"q\ty\t0\n', {"quotes": False}),
        ("t.csv", 'y;c;g;s\r\n1;a b;x|y;0\r\n0;c:d;;1\r\n1;"""q";y;0', {"delimiter": ";"}),
        ("t.txt", 'y,c,g,s\n\n1,a b,x|y,0\n0,"c:d",,1\n\n1,"""q",y,0\n\n', {}),
        ("t.tsv", '\ufeffy\tc\tg\ts\n1\ta b\tx|y\t0\n0\tc:d\t\t1\n1\t"""q"\ty\t0\n', {}),
    ],
)
def test_delimiters_headers_and_quotes(tmp_path, name, text, how):
    path = write(tmp_path / name, text)
    twins.build_table(
        path, tmp_path / "d", label="y", categorical=("c",), bags=(("g", "|"),), test_column=("s", "1"), **how
    )
    assert twins.vocabulary(tmp_path / "d")[2:] == [("c", "a b", 1), ("c", '"q', 1), ("g", "x", 1), ("g", "y", 2)]
    assert twins.read(tmp_path / "d", "test") == [(0, [], [0], [[]])]


@pytest.mark.parametrize("name", ["PAR1", "PAR1 of", "BZh", "BZh9", "BZh91A"])
def test_a_name_that_begins_as_another_format_does(tmp_path, name):
    path = write(tmp_path / "t.csv", f"{name},y,s\na,0,0\nb,1,0\na,1,1\n")
    twins.build_table(path, tmp_path / "d", label="y", categorical=(name,), test_column=("s", "1"))
    assert [value for _, value, _ in twins.vocabulary(tmp_path / "d")] == [None, "a", "b"]


def test_a_delimiter_of_several_characters_is_found_across_reads(tmp_path, monkeypatch):
    rows = [f"{i % 2}:::a:{'b' * (i % 7)}::{':' * (i % 2)}:{i % 3}" for i in range(100)]
    monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", 64)
    path = write(tmp_path / "t.dat", "\n".join(rows))
    found = twins.build_table(
        path,
        tmp_path / "d",
        label="y",
        categorical=("c", "s"),
        columns=("y", "c", "s"),
        delimiter=":::",
        options=Options(threshold=0),
    )
    texts = {value for _, value, _ in twins.vocabulary(tmp_path / "d")}
    expected = {part for row in rows for part in row.split(":::")[1:]}
    assert texts - {None} <= expected
    assert found.statistics["rejected"] == 0


def test_rows_in_a_file_each_without_line_ends(tmp_path):
    files = [write(tmp_path / f"{i}.txt", f"{i % 2},v{i % 3}") for i in range(30)]
    twins.build_table(
        files, tmp_path / "d", label="y", categorical=("c",), columns=("y", "c"), options=Options(threshold=0)
    )
    assert len(column_of(tmp_path / "d", "train", "c")) + len(column_of(tmp_path / "d", "test", "c")) == 30


def test_malformed_lines_are_set_aside(tmp_path):
    lines = ["y,c", *(f"{i % 2},v{i}" for i in range(400))]
    lines[5], lines[300] = "1,2,3", '"one\nvalue"'
    path = write(tmp_path / "t.csv", "\n".join(lines) + "\n")
    found = twins.build_table(path, tmp_path / "d", label="y", categorical=("c",), options=Options(threshold=0))
    assert found.statistics["rejected"] == 2
    assert found.rows("train") + found.rows("test") == 398
    assert (tmp_path / "d/rejected.tsv").read_text().splitlines() == [
        f"{path}\t6\t3 columns, not 2\t1,2,3",
        f'{path}\t301\t1 columns, not 2\t"one\\nvalue"',
    ]


@pytest.mark.parametrize("preset", ["table", "criteo"])
def test_a_malformed_line_of_a_file_whose_name_is_not_utf8(tmp_path, in_process, preset):
    path = tmp_path / os.fsdecode(b"caf\xe9.csv")
    if preset == "table":
        lines, options = ["y,c", *("1,a" for _ in range(200)), "1,2,3"], ("--label", "y", "--categorical", "c")
    else:
        lines, options = ["\t".join(["1", *["2"] * 13, *["0" * 8] * 26])] * 200 + ["bad"], ()
    write(path, "\n".join(lines) + "\n")
    code, _, error = in_process(preprocess, preset, path, "--out", "d", *options)
    assert (code, error) == (0, "")
    assert "/caf?.csv\t" in (tmp_path / "d/rejected.tsv").read_text()


def test_names_with_commas_and_spaces(tmp_path, in_process):
    write(tmp_path / "t.csv", '"a, b",the label,c d,s\n1,0,x,0\n3,1,y,1\n')
    code, _, error = in_process(
        preprocess,
        "table",
        "t.csv",
        "--out",
        "d",
        "--label",
        "the label",
        "--numeric",
        '"a, b"',
        "--categorical",
        "c d, s",
        "--test-column",
        "s=1",
    )
    assert (code, error) == (0, "")
    assert manifest.read(tmp_path / "d").schema.dense == ("a, b",)
    assert manifest.read(tmp_path / "d").schema.ids == ("c d", "s")
