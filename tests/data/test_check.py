"""preprocess check: undamaged data sets are intact; damage of every kind is found, named, and not the end."""

import json

import numpy as np
import pyarrow as pa
import pytest

from hostdev import UserError
from hostdev.core import memory
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess import stored
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.check import check
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.kernels.pool import set_host_threads
from tests.data import twins
from tests.data.test_manifest import VERSION_1
from tests.manifests import edit_manifest
from tests.test_shards import WRONG_OFFSETS, bag_columns, rewrite, rewrite_bag

REMEDY = "; preprocess the data again, or copy it again from an intact source"


@pytest.fixture
def bag_data(tmp_path):
    """A data set with bags, in shards of 200 rows with two record batches each."""
    path = twins.write_arrow(tmp_path / "t.arrow", bag_columns(), rows_per_batch=100)
    bags = {"bags": (("often", None), ("rare", None)), "share": (("rare", "often"),)}
    table = TableSource([path], TableOptions(label="y", numeric=("x",), categorical=("c",), **bags))
    build(table, tmp_path / "data", Options(threshold=0, rows_per_shard=200))
    return tmp_path / "data"


def hashed(folder):
    build(Synthetic(300, 3), folder / "hashed", Options(threshold=None, hash_buckets=50))
    return folder / "hashed"


def wrong(folder):
    """What is wrong with a data set, by file: paths below its folder, and the lines' texts without what to do."""
    lines = check(folder).wrong
    assert all(line.endswith(REMEDY) and line.startswith(f"{folder}/") for line in lines)
    return [line.removesuffix(REMEDY).removeprefix(f"{folder}/") for line in lines]


def edit_vocabulary(folder, change):
    """Replace the vocabulary, given it as {name: list}; the manifest has its new checksum."""
    path = folder / "vocabulary.arrow"
    table = pa.ipc.open_file(pa.OSFile(str(path))).read_all()
    columns = table.to_pydict()
    change(columns)
    arrays = [pa.array(columns["field"]).dictionary_encode(), pa.array(columns["value"], pa.string())]
    table = pa.table([*arrays, pa.array(columns["count"], pa.int64())], names=list(columns))
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    edit_manifest(folder, lambda content: content.update(vocabulary_sha256=manifest.checksum(path)))


def test_whole_data_sets(tmp_path, in_process, small_data, films, bag_data):
    for folder in (small_data, films, bag_data, hashed(tmp_path), VERSION_1):
        code, out, err = in_process(preprocess, "check", folder)
        assert (code, err) == (0, "")
        assert all(line.endswith(": intact") for line in out.splitlines())
    assert check(films).lines == [
        f"{films}/train: 1 shard, 2,682 rows, {stored_size(films / 'train')}: intact",
        f"{films}/test: 1 shard, 318 rows, {stored_size(films / 'test')}: intact",
        f"{films}/vocabulary.arrow: 154 ids, {stored_size(films / 'vocabulary.arrow')}: intact",
        f"{films}/rejected.tsv: 0 malformed lines: intact",
        f"{films}/manifest.json: intact",
    ]


def stored_size(path):
    return memory.format_bytes(sum(file.stat().st_size for file in [path, *path.glob("*")] if file.is_file()))


def test_files_that_are_not_of_it_are_no_error(own_data, in_process):
    (own_data / "train/notes.txt").write_text("mine")
    code, out, _ = in_process(preprocess, "check", own_data)
    assert code == 0
    assert out.splitlines()[-1] == f"{own_data}/train/notes.txt: does not belong to the data set"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_it_goes_on_after_damage_and_lists_all_of_it(own_data, in_process):
    flip(own_data / "train/part-00001.arrow")
    (own_data / "train/part-00002.arrow").unlink()
    flip(own_data / "vocabulary.arrow")
    edit_manifest(own_data, lambda content: content["statistics"]["label_mean"].update(test=0.5))
    code, out, err = in_process(preprocess, "check", own_data)
    lines = out.splitlines()
    damaged = "it has a wrong checksum: it is damaged or was changed"
    missing = f"{own_data}/train/part-00002.arrow: it is missing{REMEDY}"
    shards = f"{memory.format_bytes((own_data / 'train/part-00000.arrow').stat().st_size * 2)}"
    assert code == 1
    assert lines[:3] == [
        f"{own_data}/vocabulary.arrow: {damaged}{REMEDY}",
        f"{own_data}/vocabulary.arrow: DAMAGED, 1 finding",
        f"{own_data}/train/part-00001.arrow: {damaged}{REMEDY}",
    ]
    assert lines[3] == missing
    assert lines[4].startswith(f"{own_data}/train: 3 shards, ")
    assert lines[4].endswith(" rows, " + shards + ": DAMAGED, 2 findings")
    assert lines[5].endswith("intact")
    assert lines[6] == f"{own_data}/rejected.tsv: 0 malformed lines: intact"
    assert lines[7].startswith(f"{own_data}/manifest.json: label_mean of the test rows is 0.5 in the statistics, ")
    assert lines[8:] == [
        f"{own_data}/manifest.json: statistics of train rows not compared: DAMAGED, 1 finding",
    ]
    assert err == (
        f"hostdev.data.preprocess: error: {own_data} is damaged: 4 findings: {own_data}/vocabulary.arrow: "
        f"{damaged}{REMEDY}\n"
    )


def column(name, change):
    """A change of a shard's column, given as Python values."""

    def changed(table):
        values = table[name].to_pylist()
        change(values)
        return table.set_column(table.schema.names.index(name), name, pa.array(values, table.schema.field(name).type))

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(1), "it has 199 rows, not 200"),
        (lambda table: table.drop_columns(["dense"]), "it has a wrong schema: label float, cat fixed_size_list"),
        (column("label", lambda values: values.__setitem__(3, None)), "it has missing values in 'label'"),
        (column("cat", lambda values: values[7].__setitem__(3, None)), "it has missing values in 'cat'"),
        (
            column("label", lambda values: values.__setitem__(slice(9, 11), [0.5, 2])),
            "2 labels not 0 or 1, the first in row 9: 0.5",
        ),
        (
            column("dense", lambda values: values[150].__setitem__(2, float("nan"))),
            "1 number not finite, the first in row 150, column 'I3': nan",
        ),
        (
            column("cat", lambda values: values[17].__setitem__(4, -1)),
            "1 id of column 'C5' outside its range, the first in row 17: -1 is not 17 or in ",
        ),
        (
            column("cat", lambda values: values[17].__setitem__(4, 10**6)),
            "1 id of column 'C5' outside its range, the first in row 17: 1000000 is not 17 or in ",
        ),
        (
            column("cat", lambda values: values[199].__setitem__(4, 18)),  # of the table, but of the next column
            "1 id of column 'C5' outside its range, the first in row 199: 18 is not 17 or in ",
        ),
    ],
)
def test_what_is_wrong_with_a_shard(own_data, monkeypatch, change, message):
    rewrite(own_data, change)
    for rows, threads in ((stored.MOST_ROWS, 1), (70, 3)):
        monkeypatch.setattr(stored, "MOST_ROWS", rows)
        set_host_threads(threads)
        [found] = wrong(own_data)
        assert found.startswith(f"train/part-00001.arrow: {message}")


def test_not_an_arrow_file(own_data):
    (own_data / "train/part-00001.arrow").write_bytes(b"")
    path = own_data / "train/part-00001.arrow"
    edit_manifest(own_data, lambda content: content["train"][1].update(sha256=manifest.checksum(path)))
    [found] = wrong(own_data)
    assert found.startswith("train/part-00001.arrow: it is not an Arrow file (")


def test_all_that_is_wrong_with_one_shard(own_data):
    def change(table):
        table = column("label", lambda values: values.__setitem__(0, 3))(table)
        return column("cat", lambda values: values[1].__setitem__(0, 14))(table)

    rewrite(own_data, change)
    assert [line.split(",")[0] for line in wrong(own_data)] == [
        "train/part-00001.arrow: 1 id of column 'C1' outside its range",
        "train/part-00001.arrow: 1 label not 0 or 1",
    ]


def test_the_ids_of_bags(bag_data):
    at = []

    def change(offsets, values):
        at.append(int(np.flatnonzero(np.diff(offsets))[50]))
        values[offsets[at[0]]] = 0

    rewrite_bag(bag_data, change)
    [found] = wrong(bag_data)
    message = f"1 id of column 'often' outside its range, the first in row {at[0]}: 0 is not 2 or in "
    assert found.startswith(f"train/part-00001.arrow: {message}")


@pytest.mark.parametrize("change", WRONG_OFFSETS)
def test_offsets_of_a_bag_that_cannot_be(bag_data, change):
    rewrite_bag(bag_data, change)
    [found] = wrong(bag_data)
    assert found.startswith(
        ("train/part-00001.arrow: it has broken lists (", "train/part-00001.arrow: it is not an Arrow file (")
    )


def move_a_use(columns):
    columns["count"][40] += 1
    columns["count"][41] -= 1


def copy_value(columns):
    columns["value"][40] = columns["value"][39]


def swap_fields(columns):
    fields = columns["field"]
    at = next(i for i in range(40, len(fields)) if fields[i] != fields[i - 1])
    fields[at - 1], fields[at] = fields[at], fields[at - 1]


def widen_field(columns):
    fields = columns["field"]
    at = next(i for i in range(40, len(fields)) if fields[i] != fields[i - 1])
    fields[at] = fields[at - 1]


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (move_a_use, ["2 wrong counts of training occurrences, the first for id 40 ('C1' value "]),
        (
            lambda columns: columns["count"].__setitem__(5, 7),
            [
                "its counts add up to ",
                "1 wrong count of training occurrences, the first for id 5 ('I6'): 7, not ",
            ],
        ),
        (
            lambda columns: columns["count"].__setitem__(40, -1),
            ["it has counts below 0", "1 wrong count of training occurrences, the first for id 40 "],
        ),
        (copy_value, ["ids 39 and 40 both stand for 'C1' value "]),
        (
            lambda columns: columns["value"].__setitem__(3, "x"),
            ["the ids without a value are not exactly the first 39"],
        ),
        (
            lambda columns: columns["value"].__setitem__(41, None),
            ["the ids without a value are not exactly the first 39"],
        ),
        (
            lambda columns: columns["field"].__setitem__(41, "C99"),
            ["id 41 belongs to 'C99', which is not in the schema or has "],
        ),
        (swap_fields, ["id "]),
        (widen_field, ["the ids of 'C1' are 39..", "the ids of 'C2' are "]),
        (lambda columns: [values.pop() for values in columns.values()], ["it has 153 ids, not 154"]),
        (lambda columns: columns["count"].__setitem__(3, None), ["it has missing values in 'count'"]),
    ],
)
def test_what_is_wrong_with_the_vocabulary(tmp_path, change, messages):
    found = build(Synthetic(120, 2), tmp_path / "data", Options(threshold=3, rows_per_shard=50))
    messages = [
        text.replace("it has 153 ids, not 154", f"it has {found.schema.rows - 1} ids, not {found.schema.rows}")
        for text in messages
    ]
    edit_vocabulary(tmp_path / "data", change)
    lines = wrong(tmp_path / "data")
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith(f"vocabulary.arrow: {message}")


def test_a_value_twice_far_apart(tmp_path, monkeypatch):
    """Pieces of the vocabulary are looked at together; the same value of another column is none twice."""
    monkeypatch.setattr(stored, "_MOST_IDS", 3)
    columns = {"y": [i % 2 for i in range(90)], "a": [f"v{i % 9}" for i in range(90)]}
    columns["b"] = columns["a"]
    path = twins.write_arrow(tmp_path / "t.arrow", columns)
    twins.build_table(path, tmp_path / "data", label="y", categorical=("a", "b"), options=Options(threshold=0))
    assert wrong(tmp_path / "data") == []
    edit_vocabulary(tmp_path / "data", lambda columns: columns["value"].__setitem__(10, columns["value"][3]))
    [found] = wrong(tmp_path / "data")
    assert found.startswith("vocabulary.arrow: ids 3 and 10 both stand for 'a' value 'v")


@pytest.mark.parametrize("name", ["rows", "label_mean", "out_of_vocabulary"])
@pytest.mark.parametrize("value", [0.123, None])
def test_statistics_that_are_not_those_of_the_rows(own_data, name, value):
    edit_manifest(own_data, lambda content: content["statistics"][name].update(train=value))
    [found] = wrong(own_data)
    assert found.startswith(f"manifest.json: {name} of the train rows is {value} in the statistics, but ")


def test_the_number_of_values_of_a_bag(bag_data):
    edit_manifest(bag_data, lambda content: content["statistics"]["bag_values"]["often"].update(test=3))
    [found] = wrong(bag_data)
    assert found.startswith("manifest.json: bag_values of 'often' of the test rows is 3 in the statistics, but ")


def test_version_1(tmp_path):
    """Which ids are whose only the vocabulary says there; its checksum may be missing."""
    for path in [path for path in VERSION_1.rglob("*") if path.is_file()]:
        copy = tmp_path / path.relative_to(VERSION_1)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    edit_vocabulary(tmp_path, move_a_use)
    edit_manifest(tmp_path, lambda content: content.pop("vocabulary_sha256"))
    [found] = wrong(tmp_path)
    assert found.startswith("vocabulary.arrow: 2 wrong counts of training occurrences, the first for id 40 ")
    assert "no checksum recorded: DAMAGED" in "\n".join(check(tmp_path).lines)


def test_counts_are_compared_for_every_id(own_data):
    """Whatever the number of threads, and however many arrays they count in."""
    for threads in (1, 4):
        set_host_threads(threads)
        assert wrong(own_data) == []


def test_a_broken_manifest(own_data, in_process):
    (own_data / "manifest.json").write_text("{")
    code, out, err = in_process(preprocess, "check", own_data)
    assert code == 1
    assert out.splitlines()[0].startswith(f"{own_data}/manifest.json is broken (")
    assert "is damaged: 1 finding: " in err


@pytest.mark.parametrize("name", [None, "sha256", "rejected_sha256"])
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["statistics"]["dense_max"].__setitem__(0, 3),
        lambda content: content["statistics"]["missing"]["test"].update(C1=0.5),
        lambda content: content["statistics"].update(rejected=7),
        lambda content: content["options"].update(seed=99),
        lambda content: content["sources"].clear(),
        lambda content: content["schema"].update(label="other"),
    ],
)
def test_a_changed_manifest(own_data, in_process, change, name):
    """Nothing else in the data set says what it says; nor is it intact without its checksum."""
    path = own_data / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    content.pop(name, None)
    path.write_text(json.dumps(content, indent=2))
    code, out, _ = in_process(preprocess, "check", own_data)
    assert code == 1
    assert out.splitlines() == [
        f"{path} is broken (its checksum is wrong, so the file was damaged or changed); preprocess the data again",
        f"{path}: DAMAGED, 1 finding",
    ]
    with pytest.raises(UserError, match="its checksum is wrong"):
        manifest.read(own_data)


def test_a_manifest_in_another_order_is_the_same(own_data):
    path = own_data / "manifest.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert wrong(own_data) == []


def test_lines_that_were_set_aside(own_data):
    path = own_data / "rejected.tsv"
    path.write_text("a.csv\t1\tother columns\tx\n")
    assert wrong(own_data) == ["rejected.tsv: it has a wrong checksum: it is damaged or was changed"]
    path.unlink()
    assert wrong(own_data) == ["rejected.tsv: it is missing"]


def test_a_manifest_of_before_it_had_a_checksum(own_data):
    edit_manifest(own_data, lambda content: [content.pop(name) for name in ("sha256", "rejected_sha256")])
    (own_data / "rejected.tsv").unlink()
    assert wrong(own_data) == []
    assert check(own_data).lines[-2:] == [
        f"{own_data}/rejected.tsv: 0 malformed lines, no checksum recorded: intact",
        f"{own_data}/manifest.json: no checksum recorded: intact",
    ]


def test_no_data_set(tmp_path, in_process):
    code, out, err = in_process(preprocess, "check", tmp_path)
    assert (code, out) == (2, "")
    assert err == (
        f"hostdev.data.preprocess: error: {tmp_path} is not a data set: it has no manifest.json; create a data set "
        "with python -m hostdev.data.preprocess\n"
    )


def test_too_little_memory(own_data, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"counting its .* ids needs .*, but 1000 bytes of host memory are free; use"):
        check(own_data)
