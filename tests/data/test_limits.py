"""Inputs that would take more memory than they are worth, and what the system runs short of."""

import bz2
import errno
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.checkpoint.folder import mapped
from hostdev.core import cli
from hostdev.core.errors import TransientError, UserError
from hostdev.data import manifest, shard_files
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess import files, row_groups
from hostdev.data.preprocess.inputs import InputFile
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.shards import ShardReader

OPTIONS = TableOptions(label="y", categorical=("c",))


def run(*arguments):
    return cli.run(preprocess.PROG, preprocess.main, list(map(str, arguments)))


def test_a_line_of_commas_is_no_header(tmp_path, capsys):
    """912 bytes took 4.7 GiB, and the process was ended."""
    (tmp_path / "commas.csv.bz2").write_bytes(bz2.compress(b"," * 900_000))
    table = ["table", tmp_path / "commas.csv.bz2", "--label", "y", "--categorical", "c", "--out", tmp_path / "out"]
    assert run(*table) == 2
    assert "the first line has 900,001 values separated by commas, more than 65,536" in capsys.readouterr().err


def test_many_columns_are_read(tmp_path):
    names = ["y", "c", *(f"x{i}" for i in range(3000))]
    rows = [",".join([str(i % 2), "a", *["1"] * 3000]) for i in range(4)]
    (tmp_path / "wide.csv").write_text("\n".join([",".join(names), *rows]) + "\n")
    [block] = TableSource([tmp_path / "wide.csv"], OPTIONS).blocks()
    assert len(TableSource([tmp_path / "wide.csv"], OPTIONS).parse(block)) == 4


@pytest.mark.parametrize("nested", [False, True])
def test_long_texts_of_a_dictionary_are_decoded_a_few_rows_at_a_time(tmp_path, monkeypatch, nested):
    """A file of 3 KB had 4.2 GiB of them decoded at once."""
    monkeypatch.setattr(row_groups, "MOST_BYTES", 1 << 22)
    value, n = "a" * 60_000, 4000
    texts = pa.array(["b", *[value] * (n - 1)]).dictionary_encode()
    if nested:
        texts = pa.ListArray.from_arrays(pa.array(range(n + 1), pa.int32()), texts)
    pq.write_table(pa.table({"y": [0, 1] * (n // 2), "c": texts}), tmp_path / "t.parquet", compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 20_000
    file = files.ParquetTable(InputFile(tmp_path / "t.parquet"))
    most = rows = 0
    before = pa.total_allocated_bytes()
    for part in file.parts(["y", "c"], 0):
        most = max(most, pa.total_allocated_bytes() - before)
        rows += len(part.content)
    assert rows == n
    assert most < 100 << 20


def test_usual_texts_are_decoded_as_many_at_a_time_as_ever(tmp_path):
    n = 70_000
    texts = pa.array([f"value {i % 1000}" for i in range(n)])
    pq.write_table(pa.table({"y": [0, 1] * (n // 2), "c": texts}), tmp_path / "t.parquet")
    file = files.ParquetTable(InputFile(tmp_path / "t.parquet"))
    assert [len(part.content) for part in file.parts(["y", "c"], 0)] == [files.CHUNK_ROWS, n - files.CHUNK_ROWS]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_too_little_memory_is_not_the_file_s_fault(tmp_path, monkeypatch, kind):
    """It was told as a broken file, and the finished work was removed."""
    table = pa.table({"y": [0, 1], "c": ["a", "b"]})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "t.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
            writer.write_table(table)
    source = TableSource([tmp_path / f"t.{kind}"], OPTIONS)

    def fail(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 4294967296 failed")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    monkeypatch.setattr(files.ArrowTable, "_batches", fail)
    with pytest.raises(TransientError, match=r"there is not enough memory to read the file \(malloc of size 42"):
        list(source.blocks())


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_s_name_in_no_encoding(tmp_path, kind):
    table = pa.table({"y": [0, 1], "c": ["a", "b"], "NAMEX": [1, 2]})
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, store_schema=False)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    path.write_bytes(path.read_bytes().replace(b"NAMEX", b"NAM\xff\xfe"))
    with pytest.raises(UserError, match=r"the column name 'NAM\\xff\\xfe' is not UTF-8"):
        TableSource([path], OPTIONS)


def test_too_many_open_files_say_so(small_data, monkeypatch, tmp_path):
    """It was told as "not an Arrow file; preprocess the data again"."""

    def fail(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(shard_files.pa, "memory_map", fail)
    with pytest.raises(TransientError, match="Too many open files; .*ulimit -n"):
        next(ShardReader(small_data, manifest.read(small_data), "train").batches(10))
    (tmp_path / "x").write_bytes(b"x")
    with pytest.raises(TransientError, match="Too many open files"):
        mapped(tmp_path / "x")
