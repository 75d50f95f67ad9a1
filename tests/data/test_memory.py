"""What preparing data needs of memory: bounded, announced, and refused before it is too much."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev import UserError
from hostdev.core.errors import TransientError
from hostdev.data.preprocess import criteo, files, second_pass, vocabulary
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.raw import RejectedLines, SourceLayout
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.preprocess.vocabulary import CountedValues, make_values, write_values
from hostdev.data.schema import Column


def written(path, texts):
    """Write the vocabulary of two spaces with these texts; return its rows, and how many each batch has."""
    layout, found = SourceLayout("y", ("x",), (Column("a", "id", "a"), Column("b", "id", "b"))), []
    for space in range(2):
        values = make_values(None)
        values.count(pa.array(texts, pa.large_string()), np.arange(1, len(texts) + 1))
        counted = CountedValues(values, 0, 0)
        found += counted.written(1 + space, counted.new())
    write_values(path, layout, [9, 0, 0], iter(found))
    with pa.ipc.open_file(path) as file:
        batches = [file.get_batch(i) for i in range(file.num_record_batches)]
    return [row for batch in batches for row in batch.to_pylist()], list(map(len, batches))


def test_batches_of_a_vocabulary_are_cut_where_their_texts_are_long(tmp_path, monkeypatch):
    texts = [letter * size for letter, size in zip("cdefghi", [9, 40, 100, 0, 3, 30, 11], strict=True)]
    rows, sizes = written(tmp_path / "one", texts)
    assert sizes == [17]
    assert [row["value"] for row in rows[3:10]] == texts
    monkeypatch.setattr(vocabulary, "_WRITTEN_AT_ONCE", 8)
    assert written(tmp_path / "rows", texts) == (rows, [8, 8, 1])
    monkeypatch.setattr(vocabulary, "_WRITTEN_BYTES", 50)
    # 3 fixed, 9 and 40 bytes; 100, more than all of a batch may have; 0, 3, 30 and 11; 9 and 40; and so on
    assert written(tmp_path / "bytes", texts) == (rows, [5, 1, 4, 2, 1, 4])


@pytest.mark.parametrize("take", ["criteo", "table"])
def test_malformed_lines_are_no_objects(tmp_path, take):
    """They are refused, but once it is known that they are too many for the whole input."""
    n = 1 << 18
    text = b"y,c\n" * (take == "table") + b"x\n" * n
    (tmp_path / "t.csv").write_bytes(text)
    source = CriteoText([tmp_path / "t.csv"]) if take == "criteo" else table_of(tmp_path / "t.csv")
    [block] = source.blocks()
    source.parse(block)  # which loads the kernels
    tracemalloc.start()
    rows = source.parse(block, hashed=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    row = 1 + 8 * (criteo.DENSE + criteo.CATEGORICAL)
    assert peak < 64 * n + (row * len(text) // 40 if take == "criteo" else 4 * len(text)) + (1 << 20)
    assert len(rows.rejected) == n
    about = ("1 columns, not 40" if take == "criteo" else "1 columns, not 2"), "x"
    first = 1 + (take == "table")
    places = (0, 4095, 4096, n - 1)
    assert [rows.rejected[i] for i in places] == [(str(tmp_path / "t.csv"), first + i, *about) for i in places]
    written = RejectedLines.from_columns(rows.rejected.after(1000).columns())
    assert [line.line for line in written] == list(range(first + 1000, first + 1000 + n))
    with pytest.raises(
        UserError, match=f"{n:,} rows cannot be read, more than 1% of all; the first is .*t.csv:{first}: "
    ):
        build(source, tmp_path / "out", Options())


def table_of(path):
    return TableSource([path], TableOptions(label="y", categorical=("c",)))


def test_what_writing_a_vocabulary_needs_is_announced(monkeypatch):
    monkeypatch.setattr("hostdev.core.memory.available_bytes", lambda: 449 << 20)
    vocabulary.require_memory(2**20, 100 << 20)
    monkeypatch.setattr("hostdev.core.memory.available_bytes", lambda: 448 << 20)
    with pytest.raises(TransientError, match=r"1,048,576 distinct values, and a vocabulary of them needs 448.4 MiB"):
        vocabulary.require_memory(2**20, 100 << 20)


def test_texts_that_are_in_all_pieces_count_once_in_their_estimated_bytes(tmp_path, monkeypatch):
    columns = {f"s{i}": [f"{(row + i) % 50}" for row in range(500)] for i in range(5)}
    columns |= {"y": [row % 2 for row in range(500)], "url": [f"{row:03d}" + "x" * 197 for row in range(500)]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    monkeypatch.setattr(files, "CHUNK_ROWS", 50)
    asked = []
    monkeypatch.setattr(second_pass, "require_memory", lambda *sizes: asked.append(sizes))
    how = TableOptions(label="y", categorical=("url", *(f"s{i}" for i in range(5))), test_column=("s0", "7"))
    build(TableSource([tmp_path / "t.parquet"], how), tmp_path / "out", Options(test_fraction=None))
    assert len(asked) == 2  # after the eighth piece, and at the end
    values, text_bytes = asked[-1]
    assert values == pytest.approx(490 + 49 + 4 * 49, rel=0.05)
    assert text_bytes == 490 * 200 + sum(len(str(row)) for i in range(5) for row in range(50) if row != 7 + i)


def test_shards_that_threads_cannot_hold_are_refused_while_the_first_pass_is_on(tmp_path, monkeypatch):
    rows = {"y": [0, 1] * 500, "x": [1.5] * 1000, "c": ["a", "b"] * 500, "h": [[1, 2, 3]] * 1000}
    pq.write_table(pa.table(rows | {"test": [0, 0, 0, 1] * 250}), tmp_path / "t.parquet")
    monkeypatch.setattr(files, "CHUNK_ROWS", 100)
    monkeypatch.setattr(second_pass, "_OVERHEAD", 0)
    monkeypatch.setattr(second_pass, "_CHECKED_AT_ONCE", 1)
    how = {"label": "y", "numeric": ("x",), "categorical": ("c",), "bags": (("h", None),), "test_column": ("test", "1")}
    table, out = TableSource([tmp_path / "t.parquet"], TableOptions(**how)), tmp_path / "out"
    # of each row label, number, id with whether it is known, lengths of the bag, 3 ids twice; a piece's numbers
    two = 2 * (200 * (4 + 4 + 5 + 16 + 3 * 8) + 100 * 24)
    monkeypatch.setattr(second_pass, "available_bytes", lambda: two - 1)
    asked = []
    monkeypatch.setattr(second_pass, "require_memory", lambda *sizes: asked.append(sizes))
    with pytest.raises(
        TransientError,
        match=r"^2 threads would each hold a shard of 200 rows, 12.7 KiB, but 25.4 KiB of "
        "memory are free; give a smaller --rows-per-shard, or fewer --threads$",
    ):
        build(table, out, Options(test_fraction=None, rows_per_shard=200), threads=2)
    assert len(asked) == 2  # before the third piece: with 75 rows for training in each there are two shards then
    assert not out.exists()
    monkeypatch.setattr(second_pass, "available_bytes", lambda: two)
    assert len(build(table, out, Options(test_fraction=None, rows_per_shard=200), threads=2).train) == 4
    with pytest.raises(TransientError, match=r"a thread would hold a shard of 450 .*give a smaller --rows-per-shard$"):
        build(table, tmp_path / "other", Options(test_fraction=None, rows_per_shard=10**6), threads=2)
