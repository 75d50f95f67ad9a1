"""Any table by hand: labels, splits, delimiters, quotes, malformed lines, what the folder says."""

import datetime
import json
import re
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.build import Options
from hostdev.data.schema import Column, Space
from tests.data import twins


def write(path, text):
    path.write_text(text, newline="")
    return path


def column_of(folder, split, name, space=None):
    """The values of a categorical column by the vocabulary, None for out of vocabulary."""
    found = manifest.read(folder)
    values = [row[1] for row in twins.vocabulary(folder)]
    i = found.schema.ids.index(name)
    return [values[row[2][i]] for row in twins.read(folder, split)]


def test_a_whole_table(tmp_path, in_process):
    rows = ["u1,5,0.5,a|b,s,2", "u2,3,,b,,1", "u1,4,-1,,s,2", "u3,1,NA,a||c,t,3", "u2,5,2,c,s,9", '"u,4",2,1,z,s,3']
    write(tmp_path / "ratings.csv", "\n".join(["user,stars,price,tags,city,day", *rows]) + "\n")
    code, out, error = in_process(
        preprocess,
        "table",
        "ratings.csv",
        "--out",
        "data",
        "--label",
        "stars",
        "--positive",
        ">3",
        "--numeric",
        "price",
        "--categorical",
        "user,city",
        "--bag",
        "tags=|",
        "--test-after",
        "day=3",
        "--threshold",
        0,
    )
    assert (code, error) == (0, "")
    assert out.splitlines()[0].startswith("data: 5 training and 1 test rows in 2 shards, 15 ids, labels 40.0% positive")
    assert out.splitlines()[1:] == [
        "tags: 1.2 values per training row",
        "all labels of the test rows are 1: their AUC is undefined",
    ]
    found = manifest.read(tmp_path / "data")
    # 0 price; out of vocabulary: 1 user, 2 city, 3 tags; then users u1 u2 u3 "u,4", cities s "" t, tags a b c ... z.
    assert found.schema.label == "stars"
    assert found.schema.dense == ("price",)
    assert found.schema.columns == (
        Column("user", "id", "user"),
        Column("city", "id", "city"),
        Column("tags", "bag", "tags"),
    )
    assert found.schema.spaces == (Space("user", 1, 4, 4), Space("city", 2, 8, 3), Space("tags", 3, 11, 4))
    assert twins.vocabulary(tmp_path / "data")[4:] == [
        ("user", "u1", 2),
        ("user", "u2", 1),
        ("user", "u3", 1),
        ("user", "u,4", 1),
        ("city", "s", 3),
        ("city", "", 1),
        ("city", "t", 1),
        ("tags", "a", 2),
        ("tags", "b", 2),
        ("tags", "c", 1),
        ("tags", "z", 1),
    ]
    assert twins.read(tmp_path / "data", "train") == [
        (1, [0.5], [4, 8], [[11, 12]]),
        (0, [0], [5, 9], [[12]]),
        (1, [-1], [4, 8], [[]]),
        (0, [0], [6, 10], [[11, 13]]),
        (0, [1], [7, 8], [[14]]),
    ]
    assert twins.read(tmp_path / "data", "test") == [(1, [2], [5, 8], [[13]])]
    options = json.loads((tmp_path / "data/manifest.json").read_text())["options"]
    assert options == {
        "preset": "table",
        "label": "stars",
        "positive": ">3",
        "numeric": ["price"],
        "categorical": ["user", "city"],
        "bags": {"tags": "|"},
        "share": {},
        "test_column": None,
        "test_after": ["day", "3"],
        "columns": None,
        "delimiter": None,
        "quotes": True,
        "trimmed": True,
        "threshold": 0,
        "hash_buckets": None,
        "dense": "max",
        "rows_per_shard": 1 << 18,
    }
    assert found.statistics["out_of_vocabulary"] == {"train": 0, "test": 0}
    assert found.statistics["dense_max"] == [1]
    assert manifest.read_counts(tmp_path / "data", found).sum() == found.uses("train") == 5 * 3 + 6


def test_what_is_seen_once_is_out_of_vocabulary_by_default(tmp_path, in_process):
    write(tmp_path / "t.csv", "y,c,s\n" + "".join(f"{i % 2},{'ab'[i > 2]},{i % 4}\n" for i in range(8)) + "1,z,0\n")
    code, _, _ = in_process(
        preprocess, "table", "t.csv", "--out", "d", "--label", "y", "--categorical", "c", "--test-column", "s=1"
    )
    assert code == 0
    assert column_of(tmp_path / "d", "train", "c") == ["a", "a", "b", "b", "b", "b", None]
    assert manifest.read(tmp_path / "d").statistics["out_of_vocabulary"] == {"train": 1 / 7, "test": 0}


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        (["0", "1", "1", "0"], None, [0, 1, 1, 0]),
        (["true", "False", "TRUE", " false"], None, [1, 0, 1, 0]),
        (["0.0", "1.0", "1", "0"], None, [0, 1, 1, 0]),
        ([True, False, True, True], None, [1, 0, 1, 1]),
        ([0, 1, 1, 0], None, [0, 1, 1, 0]),
        ([0.0, 1.0, 1.0, 0.0], None, [0, 1, 1, 0]),
        (["0.00", "1.00", "1e0", "-0"], None, [0, 1, 1, 0]),
        ([Decimal("0.00"), Decimal("1.00"), Decimal("1.00"), Decimal("0.00")], None, [0, 1, 1, 0]),
        (["5", "5.0", "3", "+5"], "5", [1, 1, 0, 1]),
        (["5", "5.0", "3", "+5"], ">=5", [1, 1, 0, 1]),
        (["0", "0.0", "3", "no"], "!=0", [0, 0, 1, 1]),
        ([Decimal("5.00"), Decimal("5.10"), Decimal("5.01"), Decimal("5.00")], "=5", [1, 0, 0, 1]),
        ([2**53, 2**53 + 1, 5, 2**53], str(2**53), [1, 0, 0, 1]),
        (["5e1", "50", "5", "50.0"], "50", [1, 1, 0, 1]),
        (["5", "3", "3.5", "4"], ">3", [1, 0, 1, 1]),
        ([5, 3, 4, 1], ">= 4", [1, 0, 1, 0]),
        ([5.0, 3.5, 4.0, 1.0], "<4", [0, 1, 0, 1]),
        ([5, 3, 4, 1], "<=3", [0, 1, 0, 1]),
        ([5, 3, 4, 5], "5", [1, 0, 0, 1]),
        ([5.0, 3.5, 4.0, 5.0], "=3.5", [0, 1, 0, 0]),
        (["yes", "no", " yes", "maybe"], "yes", [1, 0, 1, 0]),
        (["yes", "no", " yes", "maybe"], "==yes", [1, 0, 1, 0]),
        (["yes", "no", " no", "maybe"], "!=no", [1, 0, 0, 1]),
        (["None", "yes", "yes", "None"], "None", [1, 0, 0, 1]),  # the rule's own value is not missing
        ([" 50000+.", " - 50000.", " 50000+.", "x"], " 50000+.", [1, 0, 1, 0]),
    ],
)
def test_labels(tmp_path, values, rule, expected):
    columns = {"y": [*values, values[0]], "c": ["a"] * 5, "s": [0] * 4 + [1]}
    paths = [twins.write_parquet(tmp_path / "t.parquet", columns)]
    if not isinstance(values[0], float):  # Python writes 5.0 and True
        paths.append(twins.write_text(tmp_path / "t.tsv", columns, "\t"))
    for path in paths:
        out = tmp_path / f"{path.suffix}.out"
        twins.build_table(path, out, label="y", positive=rule, categorical=("c",), test_column=("s", "1"))
        assert [row[0] for row in twins.read(out, "train")] == expected


@pytest.mark.parametrize("rule", ["5", "!=no", "yes", ">=5"])
def test_labels_that_are_missing_are_no_labels(tmp_path, rule):
    columns = {"y": ["5", "NA", "5", "5"], "c": ["a"] * 4, "s": [0, 0, 0, 1]}
    path = twins.write_text(tmp_path / "t.tsv", columns, "\t")
    with pytest.raises(UserError, match="t.tsv:3: column 'y': the value is missing"):
        twins.build_table(path, tmp_path / "out", label="y", positive=rule, categorical=("c",), test_column=("s", "1"))


@pytest.mark.parametrize("label", ["?", "unknown", "5_0", "\u0665", "5e99999999999999999999"])
def test_labels_that_are_not_known_are_no_negatives(tmp_path, label):
    columns = {"y": ["1", "0", label, "1"], "c": ["a"] * 4, "s": [0, 0, 0, 1]}
    path = twins.write_text(tmp_path / "t.tsv", columns, "\t")
    with pytest.raises(
        UserError, match=f":4: column 'y': {re.escape(repr(label))} is not a number, so it cannot be compared with"
    ):
        twins.build_table(path, tmp_path / "out", label="y", positive="1", categorical=("c",), test_column=("s", "1"))


def test_a_rule_that_no_label_fulfils(tmp_path):
    columns = {"y": ["3", "5"] * 4, "c": ["a"] * 8, "s": [0] * 7 + [1]}
    path = twins.write_text(tmp_path / "t.tsv", columns, "\t")
    for rule, words in (
        ("9", "none of the 8 labels is positive by --positive 9; give another rule"),
        ("rating>=4", "--positive rating>=4: give only the comparison, '>=4'"),
        ("stars == 5", "--positive stars == 5: give only the comparison, '== 5'"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            twins.build_table(
                path, tmp_path / "out", label="y", positive=rule, categorical=("c",), test_column=("s", "1")
            )


def test_labels_by_number(tmp_path):
    """Arrow's dictionaries of numbers are numbers."""
    table = pa.table({"y": pa.array([0.5, 1.5] * 4).dictionary_encode(), "c": ["x"] * 8, "s": [0] * 7 + [1]})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    out = tmp_path / "out"
    twins.build_table(tmp_path / "t.arrow", out, label="y", positive="1.5", categorical=("c",), test_column=("s", "1"))
    assert [row[0] for row in twins.read(out, "train")] == [0, 1] * 3 + [0]


def test_numbers(tmp_path):
    write(tmp_path / "t.csv", "y,a,b,s\n0, 1.5 ,NA,0\n1,-3,null,0\n0,,nan,0\n1,1e1,,0\n0,+2,5,1\n")
    columns = {
        "y": [0, 1, 0, 1, 0],
        "a": [1.5, -3.0, None, 10.0, 2.0],
        "b": pa.array([None, None, None, None, 5], pa.int16()),
        "s": [False, False, False, False, True],
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    for name, test in (("t.csv", "1"), ("t.parquet", "true")):
        out = tmp_path / f"{name}.out"
        twins.build_table(
            tmp_path / name, out, label="y", numeric=("a", "b"), categorical=("s",), test_column=("s", test)
        )
        train, test = twins.read(out, "train"), twins.read(out, "test")
        assert [row[1] for row in train] == [[np.float32(v), 0] for v in (0.15, -0.3, 0, 1)]
        assert test[0][1] == [np.float32(0.2), 5]  # a column with no number in training rows is not divided


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(),
        pa.int64(),
        pa.uint16(),
        pa.float16(),
        pa.float32(),
        pa.float64(),
        pa.decimal128(22, 2),
        pa.string(),
        pa.decimal32(5, 2),
        pa.decimal64(12, 2),
        pa.dictionary(pa.int8(), pa.decimal128(22, 2)),
        pa.large_string(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int8(), pa.int64()),
    ],
)
def test_types_of_numbers_and_values(tmp_path, kind):
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    values = pa.array([1, 2, 2, 4, 4], pa.int8()).cast(inner)
    values = values.dictionary_encode().cast(kind) if inner is not kind else values.cast(kind)
    table = pa.table({"y": [0, 1, 0, 1, 1], "x": values, "c": values, "s": [0, 0, 0, 0, 1]})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    twins.build_table(
        tmp_path / "t.arrow", tmp_path / "d", label="y", numeric=("x",), categorical=("c",), test_column=("s", "1")
    )
    assert [row[1] for row in twins.read(tmp_path / "d", "train")] == [[0.25], [0.5], [0.5], [1]]
    texts = [value.removesuffix(".00") for value in column_of(tmp_path / "d", "train", "c")]
    assert texts == ["1", "2", "2", "4"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.bool_(),
        pa.date32(),
        pa.timestamp("ms"),
        pa.timestamp("us", "UTC"),
        pa.binary(),
        pa.string_view(),
        pa.null(),
    ],
)
def test_types_of_values(tmp_path, kind):
    given = {
        pa.bool_(): [True, False, None],
        pa.binary(): [b"a", b"b", None],
        pa.string_view(): ["a", "b", None],
        pa.null(): [None, None, None],
    }.get(kind, [datetime.datetime(2024, 5, 1), datetime.datetime(2024, 5, 2), None])
    table = pa.table({"y": [0, 1, 0, 1], "c": pa.array([*given, given[0]], kind), "s": [0, 0, 0, 1]})
    with pa.ipc.new_stream(tmp_path / "t.arrows", table.schema) as file:
        file.write_table(table)
    twins.build_table(tmp_path / "t.arrows", tmp_path / "d", label="y", categorical=("c",), test_column=("s", "1"))
    found = column_of(tmp_path / "d", "train", "c")
    assert found[2] == ""
    assert len(set(found)) == (1 if kind == pa.null() else 3)
    assert column_of(tmp_path / "d", "test", "c") == found[:1]


@pytest.mark.parametrize(
    ("values", "limit", "expected"),
    [
        ([3, 1, 2, 5], "2", [1, 0, 0, 1]),
        ([3.5, 1.0, 2.0, 2.5], "2", [1, 0, 0, 1]),
        ([3, 1, 2, 5], "2.5", [1, 0, 0, 1]),
        ([2**62 + 1, 2**62, 5, 2**62 + 2], str(2**62), [1, 0, 0, 1]),  # which float64 cannot tell apart
        ([2**62 + 1, 2**62, 5, 2**62 + 2], f"{2**62}.0", [1, 0, 0, 1]),
        ([17 * 10**17 + 1, 17 * 10**17, 5, 2**62], "1.7e18", [1, 0, 0, 1]),
        (pa.array([2**63 + 1, 2**63, 5, 2**64 - 1], pa.uint64()), str(2**63), [1, 0, 0, 1]),
        ([2**53 + 1, 2**53, 5, 2**53 + 2], str(2**53), [1, 0, 0, 1]),
        ([str(2**53 + 1), str(2**53), "0.5", f"+{2**53 + 1}"], str(2**53), [1, 0, 0, 1]),  # what its neighbours are
        ([str(2**64 + 1), str(2**64), "-1e3", f"{2**64 + 2}"], str(2**64), [1, 0, 0, 1]),
        ([2.0**53 + 2, 2.0**53, 5.5, 2.0**60], str(2**53 + 1), [1, 0, 0, 1]),
        (["9" * 5000, "-" + "9" * 5000, "5", str(2**53 + 1)], str(2**53), [1, 0, 0, 1]),  # more digits than int() takes
        ([3, -4, -3, 5], "-3.5", [1, 0, 1, 1]),
        ([Decimal("0.11"), Decimal("0.10"), Decimal("-1.00"), Decimal("0.12")], "0.1", [1, 0, 0, 1]),
        ([Decimal(10**36 + 1), Decimal(10**36), Decimal(5), Decimal(10**36 + 2)], "1e36", [1, 0, 0, 1]),
        (["2024-02-01", "2023-12-31", "2024-01-01", "2024-01-02"], "2024-01-01", [1, 0, 0, 1]),
        (
            ["2024-01-01 10:00", "2024-01-01", "2024-01-01 09:00:00", "2024-01-01T09:01"],
            "2024-01-01 09:00",
            [1, 0, 0, 1],
        ),
        (
            ["2024-01-01T10:00Z", "2024-01-01T10:00+02:00", "2024-01-01T09:00Z", "2025-01-01T00:00Z"],
            "2024-01-01T10:00+01:00",
            [1, 0, 0, 1],
        ),
        (["10", "9", "9.5", "1e3"], "9.5", [1, 0, 0, 1]),
        ([datetime.date(2024, 1, day) for day in (3, 1, 2, 9)], "2024-01-02", [1, 0, 0, 1]),
        ([datetime.datetime(2024, 1, 1, hour) for hour in (3, 1, 2, 9)], "2024-01-01T02:00", [1, 0, 0, 1]),
        (
            [datetime.datetime(2024, 1, 1, hour, tzinfo=ZoneInfo("UTC")) for hour in (3, 1, 2, 9)],
            "2024-01-01T03:00+01:00",
            [1, 0, 0, 1],
        ),
    ],
)
def test_rows_after_a_time_are_for_testing(tmp_path, values, limit, expected):
    columns = {"y": [0, 1, 0, 1], "c": [str(i) for i in range(4)], "t": values}
    paths = [twins.write_parquet(tmp_path / "t.parquet", columns), twins.write_text(tmp_path / "t.csv", columns)]
    for path in paths:
        out = tmp_path / f"{path.suffix}.out"
        twins.build_table(path, out, label="y", categorical=("c",), test_after=("t", limit))
        assert column_of(out, "train", "c") == [str(i) for i in range(4) if not expected[i]]
        assert len(twins.read(out, "test")) == sum(expected)


@pytest.mark.parametrize("kind", [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")])
def test_rows_after_a_time_of_day_are_for_testing(tmp_path, kind):
    times = pa.array([datetime.time(hour) for hour in (3, 1, 2, 9)]).cast(kind)
    for name, values in (("plain", times), ("dictionary", times.dictionary_encode())):
        columns = {"y": pa.array([0, 1, 0, 1]), "c": pa.array(["0", "1", "2", "3"]), "t": values}
        table = pa.table(columns)
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as file:
            file.write_table(table)
        how = {"label": "y", "categorical": ("c",), "test_after": ("t", "02:00:00")}
        twins.build_table(tmp_path / f"{name}.arrow", tmp_path / name, **how)
        assert column_of(tmp_path / name, "train", "c") == ["1", "2"]


@pytest.mark.parametrize(
    ("limit", "later"),
    [("12:00", 3), ("12:00:00.0", 3), ("12:00:00.000000050", 1), ("12:00:00.00000005", 1), ("11:59:59.999999999", 4)],
)
def test_times_of_day_are_compared_to_the_nanosecond(tmp_path, limit, later):
    noon = 12 * 3600 * 10**9
    times = pa.array([noon, noon + 1, noon + 50, noon + 51, 0, 1], pa.time64("ns"))
    table = pa.table({"y": [0, 1] * 3, "c": ["a"] * 6, "t": times})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    how = {"label": "y", "categorical": ("c",), "test_after": ("t", limit)}
    assert twins.build_table(tmp_path / "t.arrow", tmp_path / "out", **how).rows("test") == later


def test_integers_after_a_number_whatever_their_block(tmp_path, monkeypatch):
    """A float64 would take the first two for one number, as soon as another one of the block has a fraction."""
    numbers = [str(2**53), str(2**53 + 1), "1.5"] * 20
    path = twins.write_text(tmp_path / "t.csv", {"y": [0, 1, 1] * 20, "t": numbers, "c": numbers})
    for size in (1 << 24, 64):
        monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", size)
        out = tmp_path / str(size)
        twins.build_table(path, out, label="y", categorical=("c",), test_after=("t", str(2**53)))
        assert column_of(out, "train", "c") == [str(2**53), "1.5"] * 20


def test_a_value_is_one_whatever_the_type_of_integers_and_text(tmp_path):
    kinds = [
        pa.null(),
        pa.int8(),
        pa.uint64(),
        pa.float32(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.decimal128(10, 0),
        pa.string_view(),
    ]
    for i, kind in enumerate(kinds):
        inner = kind.value_type if pa.types.is_dictionary(kind) else kind
        values = pa.nulls(2) if kind == pa.null() else pa.array([5, 6], pa.int8())
        if kind != pa.null():
            whole = values.cast(pa.string()).cast(inner) if not pa.types.is_decimal(kind) else values.cast(inner)
            values = whole.dictionary_encode() if inner is not kind else whole
        table = pa.table({"y": [0, 1], "c": values, "s": [0, int(i == 9)]})
        with pa.ipc.new_file(tmp_path / f"{i}.arrow", table.schema) as file:
            file.write_table(table)
    files = [write(tmp_path / "t.csv", "y,c,s\n1,5,0\n"), *(tmp_path / f"{i}.arrow" for i in range(len(kinds)))]
    twins.build_table(files, tmp_path / "d", label="y", categorical=("c",), test_column=("s", "1"))
    assert {value for _, value, _ in twins.vocabulary(tmp_path / "d")} == {None, "", "5", "6"}


def test_rows_are_drawn_by_seed_and_number(tmp_path):
    columns = {"y": [i % 2 for i in range(200)], "c": list(range(200))}
    how = {"label": "y", "categorical": ("c",)}
    whole = twins.write_parquet(tmp_path / "t.parquet", columns)
    halves = [
        twins.write_text(tmp_path / f"{i}.csv", {k: v[s] for k, v in columns.items()})
        for i, s in enumerate((slice(70), slice(70, None)))
    ]
    for name, files, seed in (("a", whole, 3), ("b", halves, 3), ("c", whole, 4)):
        twins.build_table(files, tmp_path / name, options=Options(threshold=0, test_fraction=0.2, seed=seed), **how)
    labels = {name: [row[0] for row in twins.read(tmp_path / name, "train")] for name in "abc"}
    assert labels["a"] == labels["b"] != labels["c"]
    assert column_of(tmp_path / "a", "train", "c") == column_of(tmp_path / "b", "train", "c")
    assert 20 < len(twins.read(tmp_path / "a", "test")) < 60


@pytest.mark.parametrize("kind", [pa.decimal32(5, 2), pa.decimal64(12, 2)])
def test_small_decimals_are_labels_bags_and_splits(tmp_path, kind):
    values = pa.array([1, 0, 1, 0], pa.int8()).cast(kind)
    bags = pa.ListArray.from_arrays([0, 2, 3, 3, 4], values)
    table = pa.table({"y": values, "g": bags, "s": values})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    for name, split in (("a", {"test_column": ("s", "0.00")}), ("b", {"test_after": ("s", "0")})):
        twins.build_table(tmp_path / "t.arrow", tmp_path / name, label="y", positive=">0", bags=(("g", None),), **split)
    assert [row[1:] for row in twins.vocabulary(tmp_path / "a")] == [(None, 0), ("1.00", 1), ("0.00", 1)]
    assert [row[0] for row in twins.read(tmp_path / "a", "train")] == [1, 1]
    assert [row[0] for row in twins.read(tmp_path / "b", "train")] == [0, 0]


def test_all_training_labels_equal_is_said(tmp_path, in_process):
    write(tmp_path / "t.csv", "y,c\n" + "1,a\n" * 50)
    code, out, _ = in_process(preprocess, "table", "t.csv", "--out", "d", "--label", "y", "--categorical", "c")
    assert code == 0
    assert "all labels of the train rows are 1: nothing can be learned from them" in out


def test_booleans_are_the_same_numbers_in_text_and_parquet(tmp_path):
    values = [True, False, None, True] * 30
    columns = {"label": [0, 1] * 60, "x": values, "c": ["a"] * 120}
    how = {
        "label": "label",
        "numeric": ("x",),
        "categorical": ("c",),
        "options": Options(threshold=0, dense="standard"),
    }
    found = []
    for name, text in (
        ("t.parquet", None),
        ("True.csv", str),
        ("lower.csv", lambda value: str(value).lower()),
        ("digits.csv", lambda value: str(int(value))),
    ):
        if text is None:
            path = twins.write_parquet(tmp_path / name, columns)
        else:
            written = ["" if value is None else text(value) for value in values]
            path = twins.write_text(tmp_path / name, {**columns, "x": written})
        twins.build_table(path, tmp_path / f"{name}.d", **how)
        found.append(twins.read(tmp_path / f"{name}.d", "train"))
    assert found[0] == found[1] == found[2] == found[3]
    assert len({row[1][0] for row in found[0]}) == 3
