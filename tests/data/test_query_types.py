"""`preprocess query` reads the values of files as `preprocess table` does, or refuses them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.commands import preprocess
from hostdev.core.errors import UserError
from hostdev.data import manifest

LATE = 20_480  # rows from which DuckDB guesses types


def shards_of(folder):
    """Return the contents of a data set but for the manifest, and the mean of its labels."""
    found = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"}
    found.pop("rejected.tsv", None)  # which names the file
    return found, manifest.read(folder).statistics["label_mean"]


def run(out, *arguments):
    """Return the shards of a data set, or the message of its error."""
    try:
        preprocess.main([*map(str, arguments), "--out", str(out), "--threshold", "0", "--test-fraction", "0.3"])
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return shards_of(out)


def query(tmp_path, source, *roles):
    return run(tmp_path / "query", "query", f"SELECT * FROM {source}", *roles)


def same_as_table(tmp_path, source, files, *roles):
    """Assert that a query has the shards of the table."""
    found = query(tmp_path, source, *roles)
    assert not isinstance(found, str), found
    table = run(tmp_path / "table", "table", *files, *roles)
    assert found == table


def write(path, rows, delimiter=","):
    path.write_text("".join(delimiter.join(row) + "\n" for row in rows), encoding="utf-8")


# The values that trials found


def test_several_parquet_files_have_the_type_that_holds_all_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, value in enumerate((3, 3.5, 3, 4)):
        table = pa.table({"u": ["a", "b"] * 20, "y": [value] * 40, "price": [10 if number % 2 == 0 else 10.4] * 40})
        pq.write_table(table, f"f{number}.parquet")
    roles = ("--label", "y", "--positive", ">3.9", "--categorical", "u", "--numeric", "price")
    same_as_table(tmp_path, "'f*.parquet'", [f"f{n}.parquet" for n in range(4)], *roles)


def test_values_after_the_sample_decide_the_type_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "f.csv", [("u", "y"), *[("a", "3")] * LATE, *[("b", "3.5")] * 100, *[("a", "4")] * 100])
    roles = ("--label", "y", "--positive", ">3.9", "--categorical", "u")
    same_as_table(tmp_path, "'f.csv'", ["f.csv"], *roles)


VALUES = {
    "leading zeros": ["007", "7", "12"],
    "uuids": ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "booleans": ["T", "true", "F", "FALSE"],
    "hashes": ["#1", "#2", "x"],
}


@pytest.mark.parametrize("name", VALUES)
def test_texts_are_kept(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "f.csv", [("u", "y"), *[(value, str(n % 2)) for n in range(20) for value in VALUES[name]]])
    same_as_table(tmp_path, "'f.csv'", ["f.csv"], "--label", "y", "--categorical", "u")
