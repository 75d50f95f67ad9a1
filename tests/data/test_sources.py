"""Where rows come from changes nothing: compressed, in archives, in one file or many, on any number of threads."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev import UserError
from hostdev.data import manifest
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.folders import expand
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from tests import forks, naive
from tests.data.test_criteo import line

ROWS = 3000


def contents(folder):
    """All bytes of a data set but what its manifest says of the sources."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    found = json.loads(files.pop(manifest.FILE_NAME))
    for name in ("sources", "rejected_sha256", "sha256"):  # lines that are set aside name their file
        del found[name]
    return files, found


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Criteo text as lines, with some malformed ones."""
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    write_text(Synthetic(ROWS, 7), path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[5], lines[2000], lines[2001] = b"broken\n", b"\0" * 50 + b"\n", b"\n"
    return lines


def write_all(folder, lines):
    """The same rows in many ways: what is to be read, by name."""
    text = b"".join(lines)
    compressed = {"text.gz": gzip.compress(text), "two.gz": gzip.compress(text[:1000]) + gzip.compress(text[1000:])}
    compressed |= {f"text.{name}": pa.compress(text, codec, asbytes=True) for name, codec in [("zst", "zstd")]}
    ways = {"plain": [folder / "plain.txt"]}
    (folder / "plain.txt").write_bytes(text)
    (folder / "crlf.txt").write_bytes(text.replace(b"\n", b"\r\n"))
    ways["crlf"] = [folder / "crlf.txt"]
    for name, content in compressed.items():
        (folder / name).write_bytes(content)
        ways[name] = [folder / name]
    for name, mode in (("dac.tar.gz", "w:gz"), ("dac.tar", "w:")):
        with tarfile.open(folder / name, mode) as archive:
            for member, content in (("dac/readme.txt", b"x"), ("dac/test.txt", b"y\n"), ("dac/train.txt", text)):
                found = tarfile.TarInfo(member)
                found.size = len(content)
                archive.addfile(found, io.BytesIO(content))
        ways[name] = [folder / name]
    days = folder / "days"
    days.mkdir()
    edges = np.linspace(0, len(lines), 25).astype(int)
    for day in range(24):
        content = b"".join(lines[edges[day] : edges[day + 1]])
        path = days / (f"day_{day}" if day % 2 else f"day_{day}.gz")
        path.write_bytes(content if day % 2 else gzip.compress(content))
    (days / ".hidden").write_text("not a row")
    ways["24 days"] = [days]
    return ways


def test_the_same_shards_from_every_source_and_number_of_threads(tmp_path, rows, monkeypatch):
    expected = None
    options = Options(threshold=1, dense="log", rows_per_shard=700)
    for number, (name, files) in enumerate(write_all(tmp_path, rows).items()):
        monkeypatch.setattr(criteo, "BLOCK_BYTES", [1 << 25, 100_000, 9_000][number % 3])
        out = tmp_path / f"{name}.out"
        build(CriteoText(files), out, options, threads=1 + number % 3)
        files_found, found = contents(out)
        rejected = [text.split("\t", 3)[1:] for text in files_found.pop("rejected.tsv").decode().split("\n")[:-1]]
        assert [text[1:] for text in rejected] == [
            ["1 columns, not 40", "broken"],
            ["1 columns, not 40", "\0" * 50],
            ["1 columns, not 40", ""],
        ], name
        if name != "24 days":
            assert [text[0] for text in rejected] == ["6", "2001", "2002"]
        expected = expected or (files_found, found)
        assert (files_found, found) == expected, name
    assert len(expected[0]) >= 6


def test_standard_input(tmp_path, rows):
    (tmp_path / "plain.txt").write_bytes(b"".join(rows))
    options = ["--out", "out", "--threshold", "1", "--dense", "log", "--rows-per-shard", "700"]
    command = [sys.executable, "-m", "hostdev.data.preprocess", "criteo", "-", *options]
    with forks.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False) as process:
        output, _ = process.communicate(gzip.compress(b"".join(rows)))
    assert process.returncode == 0
    assert b"could not be read" in output
    options = Options(threshold=1, dense="log", rows_per_shard=700)
    made = build(CriteoText([tmp_path / "plain.txt"]), tmp_path / "plain", options)
    assert manifest.read(tmp_path / "out").identity == made.identity
    assert manifest.read(tmp_path / "out").sources == [{"file": "-"}]


def test_a_table_on_standard_input_and_in_folders(tmp_path, monkeypatch):
    text = "y,c\n" + "".join(f"{i % 2},v{i % 7}\n" for i in range(300))
    (tmp_path / "one.csv").write_text(text)
    folder = tmp_path / "parts"
    (folder / "deeper").mkdir(parents=True)
    for i, name in enumerate(("part-2.parquet", "part-10.parquet", "deeper/part-1.parquet")):
        rows = range(100 * i, 100 * i + 100) if i < 2 else range(200, 300)
        pq.write_table(pa.table({"y": [j % 2 for j in rows], "c": [f"v{j % 7}" for j in rows]}), folder / name)
    (folder / "_SUCCESS").touch()
    assert [path.name for path in expand([folder])] == ["part-1.parquet", "part-2.parquet", "part-10.parquet"]
    options, columns = Options(threshold=1), TableOptions(label="y", categorical=("c",))
    made = [build(TableSource([tmp_path / "one.csv"], columns), tmp_path / "a", options)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    source = TableSource([tmp_path.__class__("-")], columns)
    made.append(build(source, tmp_path / "b", options))
    assert made[0].identity == made[1].identity
    parts = build(TableSource([folder], columns), tmp_path / "c", options)
    assert parts.statistics["rows"] == made[0].statistics["rows"]


@pytest.mark.parametrize("name", ["text.gz", "text.zst", "dac.tar.gz", "dac.tar"])
def test_truncated_files_are_told(tmp_path, rows, name):
    write_all(tmp_path, rows)
    path = tmp_path / name
    content = path.read_bytes()
    for size in (len(content) - 1 if name != "dac.tar" else len(content) // 3, len(content) // 2, 600):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=rf"{name}.*: the (file|archive) cannot be read \("):
            build(CriteoText([path]), tmp_path / "out", Options())
        assert not [found for found in tmp_path.iterdir() if "out" in found.name]


def test_archives_and_formats_that_are_not_read(tmp_path, rows):
    with tarfile.open(tmp_path / "two.tar", "w") as archive:
        for name in ("a.txt", "b.txt"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(UserError, match=r"two.tar: the archive must have a train.txt, but has a.txt, b.txt"):
        CriteoText([tmp_path / "two.tar"])
    (tmp_path / "text.xz").write_bytes(b"\xfd7zXZ\0")
    with pytest.raises(UserError, match=r"text.xz: xz files are not supported; decompress the file"):
        CriteoText([tmp_path / "text.xz"])
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"nothing: the folder has no readable file"):
        CriteoText([tmp_path / "nothing"])
    with pytest.raises(UserError, match=r"- is standard input, which can be read only once"):
        CriteoText([tmp_path.__class__("-")] * 2)


COLUMNS = TableOptions(label="y", categorical=("c",))
CSV = "y,c\n0,a\n1,b\n"


def names_of(source, folder):
    return [str(Path(found["file"]).relative_to(folder)) for found in source.describe()]


def test_links_to_folders_are_followed_each_folder_once(tmp_path):
    for name in ("top/a", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "t.csv").write_text(CSV)
    (tmp_path / "top" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "top" / "a" / "back").symlink_to(tmp_path / "top")
    (tmp_path / "top" / "b").symlink_to(tmp_path / "top" / "a")
    found = expand([tmp_path / "top"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["top/a/t.csv", "top/link/t.csv"]


def test_the_same_rows_twice_are_told_of(tmp_path, capsys):
    """They may be meant where files are named; two forms of one file in a folder are not."""
    (tmp_path / "in").mkdir()
    file, other = tmp_path / "in" / "a.csv", tmp_path / "in" / "a.csv.gz"
    file.write_text(CSV)
    (tmp_path / "link.csv").symlink_to(file)
    for files, message in (
        ([file, file], f"{file} is given twice: its rows are used twice, possibly in both training and test"),
        ([file, tmp_path / "link.csv"], f"{file} and {tmp_path / 'link.csv'} are the same file: its rows are used"),
        ([tmp_path / "in", file], f"{file} is given twice: its rows"),
        ([tmp_path / "in", tmp_path / "in"], f"{file} is given twice: its rows"),
    ):
        assert len(TableSource(files, COLUMNS).describe()) == len(CriteoText(files).describe()) == 2
        assert capsys.readouterr().err.count(message) == 2
    other.write_bytes(gzip.compress(CSV.encode()))
    with pytest.raises(
        UserError, match=re.escape(f"{file} and {other} have the same rows, judging by their names; remove")
    ):
        TableSource([tmp_path / "in"], COLUMNS)
    assert len(TableSource([file, other], COLUMNS).describe()) == 2  # who names both means both


def test_what_a_folder_has_beside_tables(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in ("a.csv", "k.dat", "rows-0001", "readme.md", "z.log", "_SUCCESS", ".a.crc"):
        (tmp_path / "in" / name).write_text(CSV)
    (tmp_path / "in" / "book.xlsx").write_bytes(b"PK\3\4...")
    pq.write_table(pa.table({"y": [0, 1], "c": ["a", "b"]}), tmp_path / "in" / "x.pq")
    with (
        pa.OSFile(str(tmp_path / "in" / "x"), "wb") as file,
        pa.ipc.new_file(file, pa.schema([("y", "i8"), ("c", "utf8")])),
    ):
        pass
    source = TableSource([tmp_path / "in"], COLUMNS)
    assert names_of(source, tmp_path / "in") == ["a.csv", "x", "x.pq"]
    assert capsys.readouterr().err == (
        f"skipped in {tmp_path / 'in'}, because neither name nor content is a table's: 5 files (book.xlsx, "
        "k.dat, readme.md and 2 more); to read one, name it\n"
    )
    assert names_of(TableSource([tmp_path / "in" / "k.dat"], COLUMNS), tmp_path / "in") == ["k.dat"]
    before = source.stamp()
    (tmp_path / "in" / "more.dat").write_text(CSV)
    assert TableSource([tmp_path / "in"], COLUMNS).stamp() == before
    (tmp_path / "in" / "x.pq").unlink()
    (tmp_path / "in" / "x").unlink()
    (tmp_path / "in" / "a.csv").unlink()
    with pytest.raises(UserError, match=r"no readable file; it has 6 files \(book.xlsx, k.dat, .*only if you name"):
        TableSource([tmp_path / "in"], COLUMNS)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("b.csv.xz", b"\xfd7zXZ\0", "xz"),
        ("b.xz", b"", "xz"),
        ("b", b"\xfd7zXZ\0", "xz"),
        ("z.7z", b"7z\xbc\xaf", "7z"),
        ("z.csv.Z", b"\x1f\x9d", "compress"),
    ],
)
def test_compressed_files_in_a_folder_that_are_not_read(tmp_path, name, content, kind):
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        UserError, match=re.escape(f"{name}: {kind} files are not supported; decompress the file, or compress it as")
    ):
        TableSource([tmp_path], COLUMNS)


def test_empty_files_of_a_folder_are_passed_over(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "part-0.csv").write_text(CSV)
    (tmp_path / "in" / "part-1.csv").touch()
    (tmp_path / "in" / "part-2.csv.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "in" / "part-3.csv.gz").write_bytes(gzip.compress(CSV.encode()))
    for read in (lambda: TableSource([tmp_path / "in"], COLUMNS), lambda: CriteoText([tmp_path / "in"])):
        source = read()
        assert names_of(source, tmp_path / "in") == ["part-0.csv", "part-3.csv.gz"]
        said = f"skipped in {tmp_path / 'in'} as empty: 2 files (part-1.csv, part-2.csv.gz)\n"
        assert capsys.readouterr().err == said
    with pytest.raises(UserError, match="part-1.csv: the file is empty"):
        TableSource([tmp_path / "in" / "part-1.csv"], COLUMNS)


def test_names_with_the_same_numbers_are_in_order(tmp_path, monkeypatch):
    names = ["day_01", "day_1", "day_001", "day_02", "day_2", "day_10"]
    for name in names:
        (tmp_path / name).write_text("x")
    for order in (names, names[::-1]):
        monkeypatch.setattr("os.walk", lambda *_, order=order, **__: [(str(tmp_path), [], order)])
        assert [path.name for path in expand([tmp_path])] == ["day_001", "day_01", "day_1", "day_02", "day_2", "day_10"]


def test_standard_input_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for read in (lambda: TableSource([Path("-")], COLUMNS), lambda: CriteoText([Path("-")])):
        with pytest.raises(UserError, match=r"^standard input is closed; redirect it, as with < FILE"):
            read()


def test_zeros_after_a_gzip_file_are_passed_over(tmp_path, rows, monkeypatch):
    text = b"".join(rows[10:300])
    (tmp_path / "plain").write_bytes(text)
    expected = build(CriteoText([tmp_path / "plain"]), tmp_path / "out", Options(threshold=1)).identity
    padded = gzip.compress(text[:5000]) + bytes(3) + gzip.compress(text[5000:]) + bytes(1000)
    (tmp_path / "padded.gz").write_bytes(padded)
    made = build(CriteoText([tmp_path / "padded.gz"]), tmp_path / "file", Options(threshold=1))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(padded)))
    piped = build(CriteoText([Path("-")]), tmp_path / "piped", Options(threshold=1))
    assert made.identity == piped.identity == expected
    for wrong in (padded + b"x", padded[:-1010] + bytes(100), padded.replace(padded[200:220], bytes(20))):
        (tmp_path / "wrong.gz").write_bytes(wrong)
        with pytest.raises(UserError, match=r"wrong.gz: the file cannot be read \("):
            build(CriteoText([tmp_path / "wrong.gz"]), tmp_path / "never", Options(threshold=1))


def test_a_line_that_is_too_long(tmp_path):
    (tmp_path / "long").write_bytes(line("1").encode() + b"\n" + b"x" * 1000)
    with pytest.raises(UserError, match=r"long: no line end in 800 bytes; this is not Criteo text"):
        build(CriteoText([tmp_path / "long"], block_bytes=200), tmp_path / "out", Options())


@pytest.mark.parametrize("before", range(0, 40, 7))
def test_how_long_a_line_may_be_does_not_depend_on_where_it_begins(tmp_path, before):
    """It is set aside as any that is malformed, up to a length."""

    def blocks_of(length):
        (tmp_path / "long").write_bytes(b"y" * before + b"\n" + b"x" * (length - 1) + b"\nlast\n")
        return b"".join(block.content for block in CriteoText([tmp_path / "long"], block_bytes=20).blocks())

    assert blocks_of(80) == (tmp_path / "long").read_bytes()
    with pytest.raises(UserError, match="no line end in 80 bytes"):
        blocks_of(81)


def test_a_file_that_changes_while_it_is_read(tmp_path, rows):
    path = tmp_path / "rows"
    path.write_bytes(b"".join(rows))

    class Growing(CriteoText):
        def parse(self, block, *, hashed=False):
            with path.open("ab") as file:
                file.write(rows[0])
            os.utime(path, ns=(1, 1))
            return super().parse(block, hashed=hashed)

    with pytest.raises(
        UserError, match="rows: the file changed while it was read; run again once nothing writes to it"
    ):
        build(Growing([path]), tmp_path / "out", Options(threshold=1))
    assert [found.name for found in tmp_path.iterdir()] == ["rows"]


VALUES = st.sampled_from(
    [
        b"",
        b"0",
        b"1",
        b"-7",
        b"123456789012345678",
        b"1234567890123456789",
        b"-",
        b"0000abCD",
        b"0000abc",
        b"0000abcg",
        b"\xff",
        b"\0",
        b"\r",
        b"12 ",
    ]
)


@st.composite
def texts(draw):
    """Lines of which some are well-formed."""
    lines = []
    for _ in range(draw(st.integers(0, 6))):
        values = [draw(st.sampled_from([b"0", b"1"])), *[b"5"] * 13, *[b"89abcdef"] * 26]
        for _ in range(draw(st.integers(0, 3))):
            values[draw(st.integers(0, 39))] = draw(VALUES)
        if draw(st.integers(0, 4)) == 0:
            values = values[: draw(st.integers(1, 40))] + draw(st.lists(VALUES, max_size=2))
        lines.append(b"\t".join(values))
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    return end.join(lines) + (end if draw(st.booleans()) else b"")


@settings(max_examples=300, deadline=None)
@given(texts())
def test_lines_are_parsed_as_by_the_naive_twin(text):
    rows = criteo.parse(text, file="f")
    well, malformed = naive.criteo_lines(text)
    assert [reject.line for reject in rows.rejected] == malformed
    assert len(rows) == len(well)
    for i, (label, numbers, keys) in enumerate(well):
        assert rows.label[i] == label
        np.testing.assert_array_equal(rows.numbers[i], numbers)
        assert rows.keys[i].tolist() == keys
