"""Any table as CSV, TSV, Parquet and Arrow: the same data set, which is the naive twin's."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather

from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import files
from hostdev.data.preprocess.build import Options
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from tests.data import twins

# csv writes a carriage return unquoted where lines end otherwise, and other readers take it for the end of a line.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0|\r"), max_size=5)
WORDS = st.sampled_from(["a", "b", "Été", 'q"q', "c,d", "e\tf", "g\nh", " i ", "NA", "0", "05", ""])


def _ordinary(x):
    """No number so near to 0 that others, divided by it, are no float32: that is refused, see test_dense.py."""
    return x if abs(x) > 1e-20 else 0.0


@st.composite
def tables(draw):
    """Columns of everything that a table may hold, and how to read them."""
    n = draw(st.integers(2, 30))

    def column(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    whole = st.integers(-3, 3)
    columns = {
        "label": column(st.integers(0, 1)),
        "x": column(st.none() | st.floats(-1e6, 1e6).map(_ordinary) | st.just(float("nan"))),
        "n": column(st.none() | st.integers(-(10**15), 10**15)),
        "word": column(st.none() | WORDS | TEXT),
        "item": column(st.none() | whole | st.integers(-(2**63), 2**63 - 1)),
        "split": [
            "train",
            "test",
            *draw(st.lists(st.sampled_from(["train", "test", "other"]), min_size=n, max_size=n)),
        ],
        "tags": column(st.lists(TEXT.filter(bool) | WORDS.filter(bool), max_size=4)),
        "seen": column(st.lists(whole, max_size=4)),
    }
    columns["split"] = columns["split"][:n]
    if not any(columns["tags"]):
        columns["tags"][0] = ["a"]  # so that Arrow knows what is in the lists
    if not any(columns["seen"]):
        columns["seen"][0] = [1]
    share = draw(st.sampled_from([(), (("seen", "item"),), (("item", "seen"), ("word", "tags"))]))
    return columns, share, draw(st.integers(0, 2)), draw(st.sampled_from(["max", "log", "standard"]))


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_of_dictionaries_in_several_row_groups(tmp_path, kind):
    """Arrow does not put together what its row groups have of them."""
    words = [["x", "y"], ["z"], [], ["y"]] * 30
    columns = {"label": [0, 1] * 60, "split": ["train", "train", "train", "test"] * 30}
    how = {
        "label": "label",
        "bags": (("tags", None),),
        "test_column": ("split", "test"),
        "options": Options(threshold=0),
    }
    made = []
    for name, values in (("text", pa.list_(pa.string())), ("dictionary", kind(pa.dictionary(pa.int32(), pa.string())))):
        table = pa.table({**columns, "tags": pa.array(words, values)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
        assert pq.read_schema(tmp_path / f"{name}.parquet").field("tags").type.value_type == values.value_type
        made.append(twins.build_table(tmp_path / f"{name}.parquet", tmp_path / name, **how))
    assert [each.sha256 for each in made[0].train] == [each.sha256 for each in made[1].train]
    assert [each.sha256 for each in made[0].test] == [each.sha256 for each in made[1].test]


@settings(max_examples=15, deadline=None)
@given(tables())
def test_every_format_gives_the_twins_data_set(tmp_path_factory, drawn):
    columns, share, threshold, mode = drawn
    folder = tmp_path_factory.mktemp("formats")
    ids, bags, dense = ("word", "item"), ("tags", "seen"), ("x", "n")
    test = [value == "test" for value in columns["split"]]
    kept, counts, size, expected = twins.encode(
        columns, test, dense=dense, ids=ids, bags=bags, share=share, threshold=threshold, mode=mode
    )
    paths = [
        twins.write_text(folder / "t.csv", columns),
        twins.write_text(folder / "t.tsv", columns, "\t", quoting=twins.csv.QUOTE_ALL),
        twins.write_text(folder / "t.csv.gz", columns, ","),
        twins.write_parquet(folder / "t.parquet", columns, row_group_size=11),
        twins.write_arrow(folder / "t.arrow", columns, rows_per_batch=7),
        twins.write_arrow(folder / "t.stream", columns, stream=True),
    ]
    made = []
    for path in paths:
        out = folder / f"{path.name}.out"
        made.append(
            twins.build_table(
                path,
                out,
                label="label",
                numeric=dense,
                categorical=ids,
                bags=(("tags", "|"), ("seen", "|")),
                share=share,
                test_column=("split", "test"),
                options=Options(threshold=threshold, dense=mode, test_fraction=None),
            )
        )
        assert made[-1].schema == made[0].schema
        for split, chosen in (("train", False), ("test", True)):
            rows = twins.read(out, split)
            twin = [row for row, of_test in zip(expected, test, strict=True) if of_test == chosen]
            assert [(row[0], *row[2:]) for row in rows] == [(row[0], *row[2:]) for row in twin]
            np.testing.assert_allclose([row[1] for row in rows], [row[1] for row in twin], rtol=1e-5, atol=1e-6)
            assert rows == twins.read(folder / "t.csv.out", split)  # in every bit
    spaces = made[0].schema.spaces
    assert [space.name for space in spaces] == list(kept)
    assert made[0].schema.rows == size
    training = len(test) - sum(test)
    rare = [sum(uses for value, uses in counts[name].items() if value not in kept[name]) for name in kept]
    fixed = [(name, None, training) for name in dense]
    fixed += [(name, None, uses) for name, uses in zip(kept, rare, strict=True)]
    values = [(name, value, counts[name][value]) for name, values in kept.items() for value in values]
    for path in paths:
        assert twins.vocabulary(folder / f"{path.name}.out") == fixed + values


def columns_of(n):
    """Columns without chance."""
    return {
        "label": [i % 2 for i in range(n)],
        "x": [((i * 37) % 101) / 7 - 5 for i in range(n)],
        "item": [f"item {i * i % 53}" for i in range(n)],
        "seen": [[f"item {(i + k) % 60}" for k in range(i % 4)] for i in range(n)],
    }


@pytest.mark.drawn
@pytest.mark.parametrize("mode", ["max", "log", "standard"])
def test_the_data_set_does_not_depend_on_how_many_rows_come_at_once(tmp_path, monkeypatch, mode):
    columns = columns_of(9000)
    path = twins.write_parquet(tmp_path / "t.parquet", columns)
    text = twins.write_text(tmp_path / "t.csv", columns)
    parts = [
        twins.write_arrow(tmp_path / f"{name}.arrow", {key: values[rows] for key, values in columns.items()})
        for name, rows in (("a", slice(0, 5)), ("b", slice(5, 4321)), ("c", slice(4321, None)))
    ]
    made = []
    for name, source, chunk, values, size in (
        ("whole", path, 1 << 16, 1 << 20, 1 << 20),
        ("small", path, 333, 1 << 20, 1 << 20),
        ("short lists", path, 1 << 16, 500, 1 << 20),
        ("short text", path, 1 << 16, 1 << 20, 5000),
        ("text", text, 1, 1, 1),
        ("parts", parts, 99, 200, 3000),
    ):
        monkeypatch.setattr(files, "CHUNK_ROWS", chunk)
        monkeypatch.setattr(files, "CHUNK_VALUES", values)
        monkeypatch.setattr(files, "CHUNK_BYTES", size)
        monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", 5000)
        made.append(
            twins.build_table(
                source,
                tmp_path / name,
                label="label",
                numeric=("x",),
                categorical=("item",),
                bags=(("seen", "|"),),
                share=(("seen", "item"),),
                options=Options(threshold=1, dense=mode),
            )
        )
    for found in made[1:]:
        assert found.schema == made[0].schema
        assert found.statistics == made[0].statistics
        assert found.vocabulary_sha256 == made[0].vocabulary_sha256
    for split in ("train", "test"):
        first = twins.read(tmp_path / "whole", split)
        assert all(
            twins.read(tmp_path / name, split) == first
            for name in ("small", "short lists", "short text", "text", "parts")
        )


def write_lists(path, table, batch):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=batch)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=batch)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_parts_end_where_lists_or_texts_are_long(tmp_path, monkeypatch, name):
    """And those from the end of one on are the others, as after an interruption."""
    rng = np.random.default_rng(0)
    lists = [list(range(size)) for size in rng.choice([0, 3, 40, 700], 300, p=[0.2, 0.4, 0.35, 0.05])]
    texts = [None if size == 7 else "x" * size for size in rng.integers(0, 50, 300)]
    write_lists(tmp_path / name, pa.table({"y": [0, 1] * 150, "h": lists, "c": texts}), 110)
    monkeypatch.setattr(files, "CHUNK_VALUES", 500)
    monkeypatch.setattr(files, "CHUNK_BYTES", 400)
    table = TableSource([tmp_path / name], TableOptions(label="y", categorical=("c",), bags=(("h", None),)))
    blocks = list(table.blocks())
    parts = [block.content[1].content for block in blocks]
    assert pa.Table.from_batches(parts).select(["y", "h", "c"]).to_pylist() == [
        {"y": i % 2, "h": values, "c": text} for i, (values, text) in enumerate(zip(lists, texts, strict=True))
    ]
    for part in parts:
        values = sum(map(len, part["h"].to_pylist()))
        size = sum(len(text or "") for text in part["c"].to_pylist())
        assert len(part) == 1 or (values <= 500 and size <= 400)
    assert max(map(len, parts)) >= 3
    for i in (0, 11, len(blocks) - 1):
        rest = [block.content[1].content for block in table.blocks(blocks[i].end)]
        assert [row for part in rest for row in part.to_pylist()] == [
            row for part in parts[i + 1 :] for row in part.to_pylist()
        ]
        assert not rest or rest[0].num_rows <= parts[i + 1].num_rows


def test_as_many_rows_are_decoded_together_as_have_few_values(tmp_path, monkeypatch):
    """Of a file with long lists, a batch of 65536 rows would be beyond any memory."""
    write_lists(tmp_path / "t.parquet", pa.table({"y": [0, 1] * 500, "h": [list(range(100))] * 1000}), 1000)
    decoded = []
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, rows, **how: decoded.append(rows) or whole(self, rows, **how)
    )
    how = TableOptions(label="y", bags=(("h", None),))
    assert len(list(TableSource([tmp_path / "t.parquet"], how).blocks())) == 1
    monkeypatch.setattr(files, "CHUNK_VALUES", 5000)
    assert len(list(TableSource([tmp_path / "t.parquet"], how).blocks())) == 40
    assert decoded == [2**20 // 100, 25]


@pytest.mark.parametrize(
    "of",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.dictionary(pa.int8(), pa.string()),
    ],
    ids=str,
)
def test_lengths_of_texts_and_lists(of):
    texts = pa.array(["skipped", "Été", None, "", "much longer than a view has in it"]).cast(of)[1:]
    sizes = [5, 0, 0, 33]
    assert arrow.text_lengths(texts).tolist() == sizes
    assert arrow.list_lengths(texts).tolist() == [0] * 4
    lists = pa.ListArray.from_arrays(pa.array([0, 0, None, 1, 4], pa.int32()), texts)[1:]
    assert lists.is_null().to_pylist() == [False, True, False]
    assert arrow.list_lengths(lists).tolist() == [1, 0, 3]
    assert arrow.text_lengths(lists).tolist() == [5, 0, 33]


def test_chunks_say_how_much_of_the_files_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_ROWS", 100)
    monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", 5000)
    columns = columns_of(2000)
    feather.write_feather(twins.arrow_table(columns), tmp_path / "t.feather", compression="lz4")
    paths = [
        tmp_path / "t.feather",
        twins.write_text(tmp_path / "t.csv", columns),
        twins.write_text(tmp_path / "t.csv.gz", columns),
        twins.write_parquet(tmp_path / "t.parquet", columns),
        twins.write_arrow(tmp_path / "t.arrow", columns, rows_per_batch=450),
        twins.write_arrow(tmp_path / "t.stream", columns, rows_per_batch=450, stream=True),
    ]
    for path in paths:
        table = TableSource([path], TableOptions(label="label", categorical=("item",), bags=(("seen", "|"),)))
        blocks = list(table.blocks())
        sizes = [block.size for block in blocks]
        assert len(sizes) > 5
        assert min(sizes) >= 0
        assert path.stat().st_size * 0.9 < sum(sizes) <= table.total == path.stat().st_size
        rows = [table.parse(block) for block in blocks]
        assert sum(map(len, rows)) == 2000 <= table.most_rows
        for i in (0, len(blocks) // 2):
            rest = [table.parse(block) for block in table.blocks(blocks[i].end)]
            assert (
                np.concatenate([one.label for one in rest]).tolist()
                == np.concatenate([one.label for one in rows[i + 1 :]]).tolist()
            )
        assert [row["file"] for row in table.describe()] == [str(path.resolve())]


def test_hashed_values_are_the_same_in_every_format_and_order(tmp_path):
    columns = columns_of(200)
    backwards = {name: values[::-1] for name, values in columns.items()}
    how = {
        "label": "label",
        "categorical": ("item",),
        "bags": (("seen", "|"),),
        "share": (("seen", "item"),),
        "options": Options(threshold=None, hash_buckets=40),
    }
    made = twins.build_table(twins.write_text(tmp_path / "t.csv", columns), tmp_path / "a", **how)
    twins.build_table(twins.write_parquet(tmp_path / "t.parquet", columns), tmp_path / "b", **how)
    twins.build_table(twins.write_parquet(tmp_path / "back.parquet", backwards), tmp_path / "c", **how)
    assert made.vocabulary is None
    assert made.schema.rows == 41
    [space] = made.schema.spaces
    assert (space.name, space.oov, space.first, space.size) == ("item", 0, 1, 40)
    rows = {name: twins.read(tmp_path / name, "train") + twins.read(tmp_path / name, "test") for name in "abc"}
    assert rows["a"] == rows["b"]
    assert sorted(map(repr, rows["a"])) == sorted(map(repr, rows["c"]))
    by_text = {}
    for i, label, (ids, bags) in [(i, row[0], row[2:]) for i, row in enumerate(sorted(rows["a"], key=repr))]:
        assert label in (0, 1)
        assert all(1 <= value < 41 for value in [*ids, *bags[0]])
        by_text.setdefault(ids[0], set()).add(i)
    assert len(by_text) > 15  # of at most 27 items


def test_bags_of_bags(tmp_path):
    """What a bag may be, by hand."""
    lists = [["a", "b"], [], None, ["b", None, "", "b"]]
    columns = {"y": [0, 1, 0, 1], "s": ["n", "n", "n", "t"], "g": lists}
    path = twins.write_parquet(tmp_path / "t.parquet", columns)
    text = tmp_path / "t.csv"
    text.write_text("y,s,g\n0,n,a;b\n1,n,\n0,n,;\n1,t,b;;;b\n")
    for name, source, separator in (("parquet", path, None), ("text", text, ";")):
        found = twins.build_table(source, tmp_path / name, label="y", bags=(("g", separator),), test_column=("s", "t"))
        assert [row[3] for row in twins.read(tmp_path / name, "train")] == [[[1, 2]], [[]], [[]]]
        assert [row[3] for row in twins.read(tmp_path / name, "test")] == [[[2, 2]]]
        assert found.statistics["bag_values"] == {"g": {"train": 2, "test": 2}}
        assert found.schema.ids == ()
        assert found.schema.dense == ()


def test_numbers_as_categories(tmp_path):
    """Whole floats are integers, which pandas makes floats where some are missing; text stays as it is."""
    columns = {"y": [0, 1, 0, 1], "s": [0, 0, 0, 1], "c": [5.0, None, float("nan"), 5.0], "d": [5, 7, None, 5]}
    path = twins.write_parquet(tmp_path / "t.parquet", columns)
    text = tmp_path / "t.csv"
    text.write_text("y,s,c,d\n0,0,5.0,5\n1,0,,7\n0,0,,\n1,1,5,5\n")
    how = {"label": "y", "categorical": ("c", "d"), "test_column": ("s", "1")}
    twins.build_table(path, tmp_path / "parquet", **how)
    values = [row[:2] for row in twins.vocabulary(tmp_path / "parquet")]
    assert values[2:] == [("c", "5"), ("c", ""), ("d", "5"), ("d", "7"), ("d", "")]
    assert twins.read(tmp_path / "parquet", "test")[0][2] == [2, 4]
    twins.build_table(text, tmp_path / "text", **how)
    assert twins.vocabulary(tmp_path / "text")[2] == ("c", "5.0", 1)
    assert twins.read(tmp_path / "text", "test")[0][2] == [0, 4]  # "5" is another text than "5.0"
