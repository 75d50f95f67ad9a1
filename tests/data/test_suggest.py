"""`preprocess suggest`: what it proposes for columns of each kind, and that the proposal is a file of features."""

import csv
import re
import tomllib
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess

N = 2000


def columns():
    rng = np.random.default_rng(2)
    items = rng.integers(1, 300, N)
    lists = [[f"i{k}" for k in rng.integers(1, 300, rng.integers(0, 3))] + ["0"] * 9 for _ in range(N)]
    return {
        "clicked": (rng.random(N) < 0.3).astype(int).tolist(),
        "user_id": rng.integers(10**6, 10**6 + 500, N).tolist(),
        "item": [f"i{item}" for item in items],
        "history": list(map("|".join, lists)),
        "price": np.round(np.exp(rng.normal(1, 2, N)), 2).tolist(),
        "age": rng.normal(40, 9, N).round(1).tolist(),
        "stars": rng.integers(1, 6, N).tolist(),
        "country": [["de", "fr", "?"][k] for k in rng.integers(0, 3, N)],
        "time": (1_700_000_000 + np.arange(N)).tolist(),
        "title": [f"title-{i * 2654435761:x}" for i in range(N)],
        "version": [1] * N,
    }


def write(path, table):
    lines = [",".join(table)]
    lines += [",".join(f'"{value}"' if "," in str(value) else str(value) for value in row)
              for row in zip(*table.values(), strict=True)]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")


def test_a_proposal_for_each_kind_of_column(tmp_path, in_process):
    write(tmp_path / "t.csv", columns())
    code, printed, error = in_process(preprocess, "suggest", tmp_path / "t.csv")
    assert code == 0, error
    first = "features.toml: 4 categorical, 1 bag, 2 numeric, 3 columns left out; review it, then run"
    assert printed.splitlines()[0] == first
    text = (tmp_path / "features.toml").read_text()
    found = tomllib.loads(text)
    assert found["label"] == "clicked"
    assert found["missing"] == ["?"]
    features = found["features"]
    assert features["user_id"] == {"kind": "categorical"}
    assert features["item"] == {"kind": "categorical"}
    assert features["history"] == {"kind": "bag", "separator": "|", "missing": ["0"], "share": "item"}
    assert features["price"] == {"kind": "numeric", "scaling": "log"}
    assert features["age"] == {"kind": "numeric"}
    assert features["stars"] == features["country"] == {"kind": "categorical"}
    assert not {"time", "title", "version", "clicked"} & set(features)
    assert "# [features.time]  # left out: a time: split with --test-after" in text
    assert "# [features.title]  # left out: nearly every row has a different value" in text
    assert "# [features.version]  # left out: fewer than two distinct values" in text
    assert 'scaling = "log"  # the largest number is ' in text
    assert 'missing = ["0"]  # ' in text
    [line] = [line.strip() for line in printed.splitlines() if "preprocess table" in line]
    assert line == f"hostdev preprocess table {tmp_path / 't.csv'} --features features.toml --out DIR"
    code, _, error = in_process(preprocess, *line.split()[2:-1], "d")
    assert code == 0, error
    made = manifest.read(tmp_path / "d")
    assert made.schema.dense == ("price", "age")
    assert {column.space for column in made.schema.columns if column.name == "history"} == {"item"}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (["1", "2", "3", "4", "5"] * 40, ">3"),
        (["0.5", "5"] * 100, ">0.5"),
        (["no", "no", "yes"] * 70, "yes"),
        (["0", "1"] * 90, None),
    ],
)
def test_rules_for_labels(tmp_path, in_process, values, rule):
    write(tmp_path / "t.csv", {"rating": values, "u": [f"u{i % 9}" for i in range(len(values))]})
    assert in_process(preprocess, "suggest", tmp_path / "t.csv")[0] == 0
    assert tomllib.loads((tmp_path / "features.toml").read_text()).get("positive") == rule


def test_parquet_and_options(tmp_path, in_process):
    """Lists, times and nested columns by their types; a label by name; text without a header; no file overwritten."""
    table = pa.table({
        "y": pa.array([i % 2 for i in range(300)]),
        "seen": pa.array([[i % 20, (i * 3) % 20] for i in range(300)], pa.list_(pa.int64())),
        "item": pa.array([i % 20 for i in range(300)]),
        "when": pa.array(range(300), pa.timestamp("s")),
        "deep": pa.array([{"a": 1}] * 300),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet")
    assert in_process(preprocess, "suggest", tmp_path / "t.parquet", "--out", "f.toml")[0] == 0
    found = tomllib.loads((tmp_path / "f.toml").read_text())
    assert found["features"]["seen"] == {"kind": "bag", "share": "item"}
    assert set(found["features"]) == {"seen", "item"}
    code, _, error = in_process(preprocess, "suggest", tmp_path / "t.parquet", "--out", "f.toml")
    assert code == 2
    assert "f.toml exists already" in error
    code, _, error = in_process(preprocess, "suggest", tmp_path / "t.parquet", "--label", "z", "--out", "g.toml")
    assert code == 2
    assert "has no column 'z' for --label; it has y, seen, item" in error
    (tmp_path / "t.txt").write_text("".join(f"u{i % 9};{i % 3}\n" for i in range(200)))
    flags = ("--columns", "who,what", "--delimiter", ";", "--out", "h.toml")
    code, printed, _ = in_process(preprocess, "suggest", tmp_path / "t.txt", *flags)
    assert code == 0
    assert "no column looks like a label: name the label with --label NAME" in printed
    assert f"{tmp_path / 't.txt'} --columns who,what --delimiter ';' --features h.toml --out DIR" in printed


M = 600  # rows of the tables below
NAMES = ["Anna", "Bob", "Carl", "Dora", "Eve"], ["Schmidt", "Jones", "Miller", "Lopez"]
WORDS = ["red", "lost", "dark", "old", "blue", "river", "king", "house", "night", "game"]


def propose(folder, in_process, columns, *flags, suffix="csv"):
    """Return what is proposed for a table: the parsed file, by column what is left out, and the printed lines."""
    path = folder / f"t.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    else:
        pq.write_table(pa.table(columns), path)
    out = folder / "proposed.toml"
    out.unlink(missing_ok=True)
    code, printed, error = in_process(preprocess, "suggest", path, "--out", out, *flags)
    assert code == 0, error
    text = out.read_text()
    left = dict(re.findall(r'^# \[features\.("?.+?"?)\]  # left out: (.*)$', text, re.MULTILINE))
    return tomllib.loads(text), {name.strip('"'): why for name, why in left.items()}, printed


def labels():
    return (np.random.default_rng(4).random(M) < 0.3).astype(int)


FORMS = [
    *("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S+01:00", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%d %H:%M"),
    *("%d.%m.%Y %H:%M", "%d.%m.%Y", "%m/%d/%Y %I:%M:%S %p", "%Y/%m/%d", "%d %b %Y %H:%M", "%Y%m%dT%H%M%S", "%H:%M:%S"),
    *("%a, %d %b %Y %H:%M:%S GMT", "%d/%b/%Y:%H:%M:%S +0000", "%B %d, %Y", "%d-%m-%y %H:%M", "%Y%m%d", "%Y%m%d%H"),
]


def test_times_of_every_usual_form_are_no_features(tmp_path, in_process):
    """Neither bags, split at the blank, nor numbers or ids, whatever the column's name."""
    rng = np.random.default_rng(1)
    seconds = 1_709_294_400 + rng.integers(0, 20 * 86400, M)
    times = [datetime.fromtimestamp(int(one), UTC) for one in seconds]
    table = {"y": labels()} | {f"x{chr(97 + i)}": [one.strftime(form) for one in times] for i, form in enumerate(FORMS)}
    table |= {f"s{unit}": seconds * 10**unit for unit in (0, 3, 6, 9)} | {"f": seconds + 0.25}
    table |= {"createdAt": seconds // 60, "hour_of_day": [one.hour for one in times], "u": rng.integers(0, 9, M)}
    table["some"] = ["" if i % 2 else one.isoformat() for i, one in enumerate(times)]
    found, left, _ = propose(tmp_path, in_process, table)
    assert set(found["features"]) == {"hour_of_day", "u"}
    assert all("a time" in why for why in left.values())


def test_texts_with_blanks_and_commas_are_bags_only_if_they_have_values(tmp_path, in_process):
    rng = np.random.default_rng(1)

    def some(words, separator, low, high):
        return [separator.join(rng.choice(words, rng.integers(low, high), replace=False)) for _ in range(M)]

    codes = [f"m{k:03d}" for k in range(60)]
    table = {
        "y": labels(),
        "who": [f"{rng.choice(NAMES[0])} {rng.choice(NAMES[1])}" for _ in range(M)],
        "who2": [f"{rng.choice(NAMES[1])}, {rng.choice(NAMES[0])}" for _ in range(M)],
        "title": some(WORDS, " ", 2, 5),
        "heading": [f"The {rng.choice(WORDS)} of {rng.choice(WORDS)}" for _ in range(M)],
        "place": rng.choice(["New York", "San Diego", "Los Angeles", "Berlin"], M),
        "where": rng.choice(["Berlin, Germany", "Lyon, France", "Rome, Italy"], M),
        "size": [f"{k} cm" for k in rng.integers(1, 9, M)],
        "phone": [f"+49 170 {k}" for k in rng.integers(100, 180, M)],
        "tags": some(WORDS, " ", 1, 4),
        "wrd": some(WORDS, " ", 1, 4),
        "seen": some(codes, " ", 1, 5),
        "same_length": some(codes, " ", 3, 4),
        "cat": some(["Food", "Bars", "Shops"], ", ", 1, 3),
        "numbers": [",".join(map(str, rng.integers(0, 50, rng.integers(1, 5)))) for _ in range(M)],
    }
    found, left, _ = propose(tmp_path, in_process, table)
    kinds = {name: settings["kind"] for name, settings in found["features"].items()}
    bags = {"tags", "wrd", "seen", "same_length", "cat", "numbers"}
    assert {name for name, kind in kinds.items() if kind == "bag"} == bags
    assert found["features"]["cat"]["separator"] == ","
    assert {name for name, kind in kinds.items() if kind == "categorical"} | set(left) == set(table) - bags - {"y"}


def test_lists_of_numbers_in_text_and_decimal_commas(tmp_path, in_process):
    rng = np.random.default_rng(1)

    def vectors(separator, low, high, form="{}"):
        each = [rng.normal(0, 1, rng.integers(low, high)) for _ in range(M)]
        return [form.format(separator.join(f"{x:.1f}" for x in one)) for one in each]

    table = {
        "y": labels(),
        "a": vectors(",", 4, 5),
        "b": vectors(" ", 3, 4),
        "c": vectors(", ", 2, 3, "[{}]"),
        "d": vectors(";", 3, 4),
        "varying": vectors(" ", 1, 4),
        "ids": [str(rng.choice(WORDS, 2).tolist()) for _ in range(M)],
        "brackets": [str(rng.integers(0, 9, 2).tolist()) for _ in range(M)],
        "u": rng.integers(0, 9, M),
    }
    found, left, _ = propose(tmp_path, in_process, table)
    lengths = {name: one.get("length") for name, one in found["features"].items()}
    assert lengths == {"a": 4, "b": 3, "c": 2, "d": 3, "u": None}
    assert set(left) == {"varying", "ids", "brackets"}
    flags = ("--features", tmp_path / "proposed.toml", "--out", tmp_path / "made")
    code, _, error = in_process(preprocess, "table", tmp_path / "t.csv", *flags)
    assert code == 0, error
    assert len(manifest.read(tmp_path / "made").schema.dense) == 12
    price = [f"{x:.2f}".replace(".", ",") for x in rng.normal(20, 5, M)]
    found, _, _ = propose(tmp_path, in_process, {"y": labels(), "price": price, "u": table["u"]})
    assert (found["decimal"], found["features"]["price"]) == (",", {"kind": "numeric"})
    code, _, error = in_process(preprocess, "table", tmp_path / "t.csv", *flags[:-1], tmp_path / "commas")
    assert code == 0, error
    age = rng.normal(40, 9, M).round(1)
    found, left, printed = propose(tmp_path, in_process, {"y": labels(), "price": price, "age": age, "u": table["u"]})
    assert "decimal" not in found
    assert "price" in left
    assert "check price: " in printed


def test_a_second_outcome_beside_the_label_is_asked_about(tmp_path, in_process):
    """By its name, or because its values give the label away; a feature that does neither stays."""
    rng, y = np.random.default_rng(1), labels()
    bought = y * (rng.random(M) < 0.2)
    table = {
        "clicked": y,
        "converted": bought,
        "is_purchase": np.where(bought, "yes", "no"),
        "buyFlag": np.where(bought, "True", "False"),
        "flag7": bought,
        "amount": np.where(bought, 9.5, 0),
        "note": np.where(bought, "x", ""),
        "seen_before_click": np.maximum(y, rng.random(M) < 0.5).astype(int),
        "predicted": y + rng.random(M) / 2,
        "member": rng.integers(0, 2, M),
        "bought_before": rng.integers(0, 2, M),
        "stars": rng.integers(1, 6, M),
        "rare": (rng.random(M) < 0.01).astype(int),
        "item": rng.integers(0, 90, M),
    }
    kept = {"member", "bought_before", "stars", "rare", "item"}
    for suffix in ("csv", "parquet"):
        found, left, printed = propose(tmp_path, in_process, table, suffix=suffix)
        assert found["label"] == "clicked"
        assert set(found["features"]) == kept
        assert all(f"check {name}: " in printed for name in set(table) - kept - {"clicked"})
    found, left, _ = propose(tmp_path, in_process, table, "--label", "converted", suffix="parquet")
    assert {"clicked", "is_purchase", "flag7"} <= set(left)
    assert set(found["features"]) == kept | {"predicted"}


def test_a_label_says_yes_where_yes_is_frequent(tmp_path, in_process):
    found, *_ = propose(tmp_path, in_process, {"label": np.where(labels(), "no", "yes"), "u": np.arange(M) % 9})
    assert found["positive"] == "yes"


def test_weights_of_rows(tmp_path, in_process):
    rng = np.random.default_rng(1)
    weights = (2 * rng.random(M)).round(3)
    table = {"y": labels(), "u": rng.integers(0, 9, M), "body_weight": rng.normal(70, 9, M).round(1)}
    for name in ("sample_weight", "sampleWeight", "row_weight", "importance_weight", "ips"):
        found, left, _ = propose(tmp_path, in_process, table | {name: weights})
        assert (found["weight"], set(found["features"])) == (name, {"u", "body_weight"})
        assert not left
    for name in ("weight", "w", "importance"):
        found, left, printed = propose(tmp_path, in_process, table | {name: weights})
        assert (set(found["features"]), set(left)) == ({"u", "body_weight"}, {name})
        assert f"check {name}: " in printed
        assert f'weight = "{name}"' in left[name]


def test_columns_that_number_the_rows_or_never_change(tmp_path, in_process):
    rng = np.random.default_rng(1)
    table = {
        "": range(M),
        "y": labels(),
        "position": np.arange(M) + 17,
        "number": rng.permutation(M),
        "transaction": np.cumsum(rng.integers(1, 9, M)),
        "uid": rng.permutation(M) * 7 + 3,
        "sessionId": rng.permutation(M) + 10**9,
        "hash": [f"{x:x}" for x in rng.integers(2**40, 2**60, M)],
        "constant": ["same"] * M,
        "empty": [""] * M,
        "sometimes": np.where(rng.random(M) < 0.5, "Y", ""),
        "userId": rng.integers(0, 300, M),
        "income": rng.integers(10**4, 10**5, M),
    }
    found, left, _ = propose(tmp_path, in_process, table)
    kinds = {name: settings["kind"] for name, settings in found["features"].items()}
    assert kinds == {"sometimes": "categorical", "userId": "categorical", "income": "numeric"}
    assert set(left) == set(table) - set(kinds) - {"y"}


@pytest.mark.parametrize("line", ['{{"y": {}, "b": {}}}', "1,{},1,{}"])
def test_a_file_without_usable_names_is_refused(tmp_path, in_process, line):
    (tmp_path / "t.csv").write_text("\n".join(line.format(i % 2, i % 7) for i in range(200)))
    code, _, error = in_process(preprocess, "suggest", tmp_path / "t.csv")
    assert (code, error.count("\n")) == (2, 1)
    assert "t.csv" in error
    assert not (tmp_path / "features.toml").exists()
