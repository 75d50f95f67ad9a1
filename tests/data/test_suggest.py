"""`preprocess suggest`: what it proposes for columns of each kind, and that the proposal is a file of features."""

import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.commands import preprocess
from hostdev.data import manifest

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
