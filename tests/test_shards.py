import json

import numpy as np
import pyarrow as pa
import pytest

from hostdev import UserError
from hostdev.data import manifest
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.shards import ShardReader
from tests.data import twins
from tests.manifests import as_version_1, edit_manifest, write_manifest


def reader(folder, split="train"):
    return ShardReader(folder, manifest.read(folder), split)


def flat(batches):
    """All rows of some batches as one array [n, 40]."""
    return np.concatenate([np.column_stack([batch.label, batch.dense, batch.ids]) for batch in batches])


def rewrite(folder, change, *, shard=1, rows_per_batch=None):
    """Change a training shard's table, and the manifest so that its checksum is right."""
    content = json.loads((folder / "manifest.json").read_text())
    entry = content["train"][shard]
    table = change(pa.ipc.open_file(folder / entry["file"]).read_all())
    with pa.ipc.new_file(folder / entry["file"], table.schema) as file:
        file.write_table(table, max_chunksize=rows_per_batch)
    entry["sha256"] = manifest.checksum(folder / entry["file"])
    write_manifest(folder, content)
    return folder / entry["file"]


@pytest.mark.parametrize("batch_size", [1, 64, 1000, 1500, 1501, 10_000])
@pytest.mark.parametrize("seed", [None, 5])
def test_every_row_once(small_data, batch_size, seed):
    rows = reader(small_data)
    batches = list(rows.batches(batch_size, seed=seed))
    sizes = [len(batch) for batch in batches]
    assert len(batches) == rows.steps(batch_size)
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert sum(sizes) == rows.rows
    found, expected = flat(batches), flat(rows.batches(rows.rows))
    if seed is None:
        np.testing.assert_array_equal(found, expected)
    else:
        assert not np.array_equal(found, expected)
        np.testing.assert_array_equal(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])


def test_the_order_depends_on_seed_and_epoch_only(small_data):
    first = flat(reader(small_data).batches(100, seed=5, epoch=1))
    np.testing.assert_array_equal(first, flat(reader(small_data).batches(333, seed=5, epoch=1)))
    for other in ({"seed": 5, "epoch": 2}, {"seed": 6, "epoch": 1}):
        assert not np.array_equal(first, flat(reader(small_data).batches(100, **other)))


def test_a_batch_has_what_the_schema_says(small_data):
    batch = next(reader(small_data).batches(50))
    assert len(batch) == 50
    assert batch.label.shape == (50,)
    assert batch.dense.shape == (50, 13)
    assert batch.ids.shape == (50, 26)
    assert batch.bags == {}
    assert batch.ids.dtype == np.int32
    assert batch.label.dtype == batch.dense.dtype == np.float32


def read_all(folder):
    return list(reader(folder).batches(100))


def test_a_damaged_shard_is_named(own_data):
    path = own_data / "train/part-00001.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="part-00001.arrow has a wrong checksum"):
        read_all(own_data)


def test_a_missing_shard_is_named(own_data):
    (own_data / "train/part-00001.arrow").unlink()
    with pytest.raises(UserError, match="part-00001.arrow is missing"):
        read_all(own_data)


def test_a_wrong_schema_is_named(own_data):
    rewrite(own_data, lambda table: table.set_column(0, "label", table["label"].cast(pa.float64())))
    with pytest.raises(UserError, match="part-00001.arrow has a wrong schema: label double"):
        read_all(own_data)


def test_a_wrong_number_of_rows_is_named(own_data):
    rewrite(own_data, lambda table: table.slice(1))
    with pytest.raises(UserError, match="part-00001.arrow has 199 rows, not 200"):
        read_all(own_data)


def test_missing_values_are_refused(own_data):
    def change(table):
        label = table["label"].to_pylist()
        return table.set_column(0, "label", pa.array([None, *label[1:]], pa.float32()))

    rewrite(own_data, change)
    with pytest.raises(UserError, match="part-00001.arrow has missing values"):
        read_all(own_data)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_an_id_beyond_the_table_names_shard_row_field_and_id(own_data, wrong):
    size = manifest.read(own_data).vocabulary_size

    def change(table):
        cat = np.array(table["cat"].to_pylist(), np.int32)
        cat[17, 4] = wrong
        return table.set_column(2, "cat", pa.FixedSizeListArray.from_arrays(pa.array(cat.ravel()), 26))

    rewrite(own_data, change)
    with pytest.raises(
        UserError,
        match=rf"part-00001.arrow, row 17, field C5: id {wrong} is not one of the data set's ids, 0..{size - 1}",
    ):
        read_all(own_data)


def test_a_label_that_is_none_is_named(own_data):
    def change(table):
        return table.set_column(0, "label", pa.array([0.0] * 9 + [0.5] + [1.0] * 190, pa.float32()))

    rewrite(own_data, change)
    with pytest.raises(UserError, match=r"part-00001.arrow, row 9, label: 0.5 is not 0 or 1"):
        read_all(own_data)


def test_not_an_arrow_file(own_data):
    path = own_data / "train/part-00001.arrow"
    path.write_bytes(b"ARROW?")
    edit_manifest(own_data, lambda content: content["train"][1].update(sha256=manifest.checksum(path)))
    with pytest.raises(UserError, match="part-00001.arrow is not an Arrow file"):
        read_all(own_data)


def test_missing_values_within_a_list(own_data):
    def change(table):
        cat = table["cat"].to_pylist()
        cat[5][3] = None
        return table.set_column(2, "cat", pa.array(cat, table.schema.field("cat").type))

    rewrite(own_data, change)
    with pytest.raises(UserError, match="part-00001.arrow has missing values"):
        read_all(own_data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocabulary_size", 0),
        ("vocabulary_size", "99"),
        ("vocabulary_size", 1e3),
        ("dense_names", None),
        ("categorical_names", ["C1", "C1"]),
        ("id_type", "foo"),
        ("train", []),
        ("rows", "5"),
        ("rows", 0),
        ("file", None),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_broken_manifest(own_data, version, key, value):
    content = json.loads((own_data / "manifest.json").read_text())
    content = as_version_1(content) if version == 1 else content
    (content["train"][0] if key in ("rows", "file") else content)[key] = value
    write_manifest(own_data, content)
    with pytest.raises(UserError, match="manifest.json is broken"):
        manifest.read(own_data)


def bag_columns(n=700):
    """Columns of a table with two bags, one of which is empty in most rows."""
    return {
        "y": [i % 3 % 2 for i in range(n)],
        "x": [i / 7 for i in range(n)],
        "c": [f"c{i % 11}" for i in range(n)],
        "often": [[f"t{(i * k) % 17}" for k in range(i % 5)] for i in range(n)],
        "rare": [["r"] * (3 * (i % 50 == 49)) for i in range(n)],
    }


@pytest.fixture
def bag_data(tmp_path):
    """A data set with bags, in shards of 200 rows with two record batches each."""
    path = twins.write_arrow(tmp_path / "t.arrow", bag_columns(), rows_per_batch=100)
    table = TableSource(
        [path],
        TableOptions(
            label="y",
            numeric=("x",),
            categorical=("c",),
            bags=(("often", None), ("rare", None)),
            share=(("rare", "often"),),
        ),
    )
    build(table, tmp_path / "data", Options(threshold=0, rows_per_shard=200))
    return tmp_path / "data"


def rows_of(batches):
    """All rows of some batches, each a tuple of Python values."""
    rows = []
    for batch in batches:
        assert batch.bags.keys() == {"often", "rare"}
        bags = []
        for values, lengths in batch.bags.values():
            assert values.dtype == batch.ids.dtype
            assert lengths.dtype == np.int32
            assert lengths.shape == (len(batch),)
            assert lengths.sum() == len(values)
            bags.append([tuple(part.tolist()) for part in np.split(values, np.cumsum(lengths)[:-1])])
        rows += zip(batch.label.tolist(), batch.dense[:, 0].tolist(), batch.ids[:, 0].tolist(), *bags, strict=True)
    return rows


@pytest.mark.parametrize("batch_size", [1, 33, 200, 350, 10_000])
@pytest.mark.parametrize("seed", [None, 5])
def test_every_row_once_with_its_bags(bag_data, batch_size, seed):
    rows = reader(bag_data)
    tables = [pa.ipc.open_file(bag_data / shard.file).read_all() for shard in manifest.read(bag_data).train]
    expected = [
        (row["label"], row["dense"][0], row["cat"][0], tuple(row["bag:often"]), tuple(row["bag:rare"]))
        for table in tables
        for row in table.to_pylist()
    ]
    assert len(expected) == rows.rows
    assert len({row[3] for row in expected}) > 20
    found = rows_of(rows.batches(batch_size, seed=seed))
    assert (found == expected) == (seed is None)
    assert sorted(found) == sorted(expected)


def test_the_order_of_rows_with_bags_depends_on_seed_and_epoch_only(bag_data):
    first = rows_of(reader(bag_data).batches(100, seed=5, epoch=1))
    assert first == rows_of(reader(bag_data).batches(33, seed=5, epoch=1))
    assert first != rows_of(reader(bag_data).batches(100, seed=5, epoch=2))


def rewrite_bag(folder, change):
    """Replace the lists of a bag in a training shard, given the offsets and the values of all."""

    def changed(table):
        table = table.combine_chunks()
        column = table["bag:often"].chunk(0)
        offsets, values = column.offsets.to_numpy().copy(), column.flatten().to_pylist()
        change(offsets, values)
        buffers = [None, pa.py_buffer(offsets)]
        inside = pa.array(values, pa.int32())
        column = pa.ListArray.from_buffers(column.type, len(table), buffers, children=[inside])
        return table.set_column(table.schema.names.index("bag:often"), "bag:often", column)

    return rewrite(folder, changed)


@pytest.mark.parametrize(("wrong", "at"), [(-1, 0), (10**6, 0), (-1, -1)])
def test_an_id_in_a_bag_beyond_the_table(bag_data, wrong, at):
    size = manifest.read(bag_data).schema.rows
    rows = []

    def change(offsets, values):
        row = next(
            i for i in range(100, 150) if offsets[i - 1] == offsets[i] < offsets[i + 1]
        )  # one after an empty bag
        values[offsets[row] + at] = wrong
        rows.append(row if at == 0 else int(np.flatnonzero(offsets < offsets[row])[-1]))  # the last value before it

    rewrite_bag(bag_data, change)
    message = (
        rf"part-00001.arrow, row {rows[0]}, field often: id {wrong} is not one of the data set's ids, 0..{size - 1}"
    )
    with pytest.raises(UserError, match=message):
        read_all(bag_data)


def test_a_value_that_is_missing_in_a_bag(bag_data):
    rewrite_bag(bag_data, lambda offsets, values: values.__setitem__(100, None))
    with pytest.raises(UserError, match="part-00001.arrow has missing values"):
        read_all(bag_data)


WRONG_OFFSETS = [
    lambda offsets, values: offsets.__setitem__(50, offsets[52] + 1),
    lambda offsets, values: offsets.__setitem__(50, -1),
    lambda offsets, values: offsets.__setitem__(slice(50, 60), 10**6),
]


@pytest.mark.parametrize("change", WRONG_OFFSETS)
def test_offsets_of_a_bag_that_cannot_be(bag_data, change):
    rewrite_bag(bag_data, change)
    with pytest.raises(UserError, match="part-00001.arrow (has broken lists|is not an Arrow file)"):
        read_all(bag_data)


def test_a_bag_that_is_missing_is_a_wrong_schema(bag_data):
    rewrite(bag_data, lambda table: table.drop_columns(["bag:rare"]))
    with pytest.raises(UserError, match="part-00001.arrow has a wrong schema: label float, .*not .*bag:rare list"):
        read_all(bag_data)


def test_ids_of_64_bits_in_bags(tmp_path):
    path = twins.write_arrow(tmp_path / "t.arrow", bag_columns(50))
    table = TableSource([path], TableOptions(label="y", categorical=("c",), bags=(("often", None),)))
    build(table, tmp_path / "data", Options(threshold=None, hash_buckets=2**40))
    batch = next(reader(tmp_path / "data").batches(40))
    assert batch.ids.dtype == batch.bags["often"][0].dtype == np.int64
    assert batch.bags["often"][0].max() > 2**31
    assert batch.dense.shape == (40, 0)


def test_a_data_set_with_bags_alone(tmp_path):
    path = twins.write_arrow(tmp_path / "t.arrow", bag_columns(100))
    build(
        TableSource([path], TableOptions(label="y", bags=(("often", None),))), tmp_path / "data", Options(threshold=0)
    )
    batches = list(reader(tmp_path / "data").batches(40, seed=1))
    assert all(batch.ids.shape == (len(batch), 0) and batch.ids.dtype == np.int32 for batch in batches)
    assert sum(len(batch) for batch in batches) == reader(tmp_path / "data").rows
