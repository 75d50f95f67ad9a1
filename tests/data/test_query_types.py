"""`preprocess query` reads the values of files as `preprocess table` does, or refuses them."""

import collections
import gzip
import json
import random
import re
import shutil
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.source import QueryRows
from hostdev.data.preprocess.unlabelled import rows_in
from tests.data.test_query import rows_of

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


def served(folder, path):
    """Return the ids that the raw rows of a file get when a model is served."""
    found = manifest.read(folder)
    parts = rows_in(path, Encoding(found, folder / found.vocabulary), found.options).parts()
    return [part.batch.ids.tolist() for part in parts]


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
    "leading zeros": (["7", "12"], ["007"]),
    "capitals": (["T", "true", "F", "FALSE"], ["TRUE"]),
    "times": (["2026-11-01 12:00:00", "2026-11-02 12:00:00"], ["2026-11-03T12:00:00"]),
    "dates": (["2026-11-01", "2026-11-02"], ["2026-11-3"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_texts_are_kept(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    first, last = VALUES[name]
    texts = [*first * (LATE // len(first) + 1), *last * 100]
    write(tmp_path / "f.csv", [("u", "y"), *[(text, str(n % 2)) for n, text in enumerate(texts)]])
    roles = ("--label", "y", "--categorical", "u")
    found = query(tmp_path, "'f.csv'", *roles)
    if isinstance(found, str):
        assert re.search(rf"column 'u': .* {last[0]!r} in row {len(texts) - 99:,} of f.csv", found)
        found = query(tmp_path, "read_csv('f.csv', types = {'u': 'VARCHAR'})", *roles)
    assert found == run(tmp_path / "table", "table", "f.csv", *roles)
    assert served(tmp_path / "query", tmp_path / "f.csv") == served(tmp_path / "table", tmp_path / "f.csv")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Return the rows of a query in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def found(sql):
        return rows_of(opened(tmp_path, sql)).to_pylist()

    return found


def opened(tmp_path, sql):
    return QueryRows(sql, Engine(2, 256 << 20, tmp_path / "spill"), 2)


def write_json(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_fields_of_json(rows, tmp_path):
    """Fields that are null first, texts among numbers, and texts that look like something else."""
    capitals = "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"
    first = {"f": "a1", "x": None, "u": capitals, "t": "2026-11-01", "l": ["a", 1], "s": {"d": "2026-11-01"}}
    last = {"f": 5, "x": "late", "u": capitals, "t": "2026-11-02", "l": [2.5], "s": {"d": "soon"}, "more": 7}
    write_json(tmp_path / "f.json", [first] * LATE + [last, {"f": True}])
    found = rows("SELECT * FROM 'f.json'")
    assert found[0] == {**first, "l": ["a", "1"], "more": None}
    assert found[LATE] == {**last, "f": "5", "l": ["2.5"]}
    assert found[LATE + 1]["f"] == "true"
    assert rows("SELECT month(t) AS m, t, u || f AS v FROM 'f.json'")[LATE] == {
        "m": 11,
        "t": "2026-11-02",
        "v": capitals + "5",
    }
    assert rows("SELECT f, json_type(f) AS kind FROM 'f.json'")[0] == {"f": "a1", "kind": "VARCHAR"}


def test_late_numbers_of_one_json_file(tmp_path, monkeypatch):
    """And a field of texts and numbers, whose raw rows get the ids of training when they are served."""
    monkeypatch.chdir(tmp_path)
    lines = [{"u": "a1", "y": 3}] * LATE + [{"u": 7, "y": 3.5}] * 100 + [{"u": "a1", "y": 4}] * 100
    write_json(tmp_path / "f.json", lines)
    write(tmp_path / "f.csv", [("u", "y"), *[(str(line["u"]), str(line["y"])) for line in lines]])
    roles = ("--label", "y", "--positive", ">3.9", "--categorical", "u")
    same_as_table(tmp_path, "'f.json'", ["f.csv"], *roles)
    write(tmp_path / "few.csv", [("u",), ("a1",), ("7",), ("b",)])
    [ids] = served(tmp_path / "query", tmp_path / "few.csv")
    assert len({str(one) for one in ids}) == 3  # a1, 7, and what is unknown


def test_several_json_files(rows, tmp_path):
    write_json(tmp_path / "f1.json", [{"u": 1, "v": 3}] * 3)
    write_json(tmp_path / "f2.json", [{"u": "x", "v": 3.5, "w": "007"}])
    found = rows("SELECT * FROM 'f*.json'")
    assert (found[0], found[-1]) == ({"u": "1", "v": 3.0, "w": None}, {"u": "x", "v": 3.5, "w": "007"})


EXPRESSIONS = {
    "price > 10": True,
    "price * 2": 20.8,
    "sum(price) OVER ()": 20.8,
    "hour(time)": 12,
    "time > '2026-10-01'": True,
    "time::DATE::VARCHAR": "2026-11-01",
    "month(day)": 11,
    "CASE WHEN flag THEN 1 ELSE 0 END": 1,
    "n + 1": 2,
    "n::VARCHAR": "1",
    "coalesce(rating, 0) > 3": True,
    "price": "10.40",
    "max(price) OVER ()": "10.40",
    "[price]": ["10.40"],
    "time": "2026-11-01T12:00:00Z",
    "day": "01/11/2026",
    "flag": "True",
    "zip": "007",
    "rating": "4.0",
    "last_items(price, n, n - 1, 3)": [],
}


def test_queries_compute_with_numbers_and_times_and_return_texts(rows, tmp_path):
    names = ("n", "price", "rating", "time", "day", "flag", "zip")
    line = ("1", "10.40", "4.0", "2026-11-01T12:00:00Z", "01/11/2026", "True", "007")
    other = ("1", "10.40", "3.5", "2026-11-13T12:00:00Z", "13/11/2026", "False", "7")
    write(tmp_path / "f.csv", [names, line, other])
    sql = ", ".join(f"{expression} AS x{i}" for i, expression in enumerate(EXPRESSIONS))
    [found] = rows(f"SELECT * FROM (SELECT {sql}, rating AS r FROM 'f.csv') WHERE r = 4")
    assert list(found.values())[:-1] == list(EXPRESSIONS.values())


def test_numbers_whose_mean_has_more_digits_than_they_have(rows, tmp_path):
    write(tmp_path / "f.csv", [("p",), ("10.25",), ("10.50",)])
    assert rows("SELECT median(p) AS m, min(p) AS least FROM 'f.csv'") == [{"m": "10.375", "least": "10.25"}]


def test_texts_that_a_query_reads_as_something_else_are_not_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = ["3", "3.0", "10.40", "1e1"]
    write(tmp_path / "f.csv", [("u", "y"), *[(value, str(n % 2)) for n in range(20) for value in values]])
    roles = ("--label", "y", "--categorical")
    same_as_table(tmp_path, "'f.csv' WHERE y >= 0", ["f.csv"], *roles, "u")
    for number, select in enumerate(("u AS v, y", "max(u) OVER () AS v, y", "* RENAME (u AS v)", "*, u AS v")):
        found = run(tmp_path / f"out{number}", "query", f"SELECT {select} FROM 'f.csv' ORDER BY 1", *roles, "v")
        assert re.search(r"column 'v'.* '3' in row 1 of f.csv .*read_csv\('f.csv', types = ", found)
    found = run(
        tmp_path / "text", "query", "SELECT u AS v, y FROM read_csv('f.csv', types = {'u': 'VARCHAR'})", *roles, "v"
    )
    assert not isinstance(found, str), found
    found = run(tmp_path / "number", "query", "SELECT u, y, 'a' AS v FROM 'f.csv'", "--numeric", "u", *roles, "v")
    assert not isinstance(found, str), found
    found = run(tmp_path / "floor", "query", "SELECT floor(u) AS v, y FROM 'f.csv'", *roles, "v")
    assert not isinstance(found, str), found


@pytest.mark.parametrize(("first", "second", "used"), [(True, "a", "c"), (2**60, 0.5, "c"), ("1.0", 1, "c")])
def test_types_of_parquet_files_that_do_not_fit(rows, tmp_path, first, second, used):
    for number, value in enumerate((first, second)):
        pq.write_table(pa.table({"u": [1], "c": [value]}), tmp_path / f"f{number}.parquet")
    with pytest.raises(UserError, match=r"column 'c'.*f0.parquet.*f1.parquet.*UNION ALL BY NAME"):
        rows(f"SELECT {used} FROM 'f*.parquet'")
    with pytest.raises(UserError, match="column 'c'"):
        rows("SELECT * FROM read_parquet(['f0.parquet', 'f1.parquet'])")
    assert rows("SELECT u FROM 'f*.parquet'") == [{"u": 1}] * 2
    assert (
        len(rows("SELECT c::VARCHAR AS c FROM 'f0.parquet' UNION ALL BY NAME SELECT c::VARCHAR FROM 'f1.parquet'")) == 2
    )


def test_types_of_parquet_files_that_fit(rows, tmp_path):
    columns = {"a": [1, 2.5, None], "b": ["x", 5, "y"], "c": [None, None, "z"], "d": [1, 2**63, 3]}
    kinds = {("d", 1): pa.uint64(), ("d", 2): pa.int32()}
    for number in range(3):
        table = {name: pa.array([of[number]], kinds.get((name, number))) for name, of in columns.items()}
        pq.write_table(pa.table(table), tmp_path / f"f{number}.parquet")
    found = rows("SELECT * FROM 'f*.parquet'")
    assert [row["a"] for row in found] == columns["a"]
    assert [row["b"] for row in found] == ["x", "5", "y"]
    assert [row["c"] for row in found] == columns["c"]
    assert [int(row["d"]) for row in found] == columns["d"]


def test_arrow_files(rows, tmp_path):
    for number in range(2):
        table = pa.table({"u": ["007", "A"], "n": [number, 2]})
        with pa.OSFile(str(tmp_path / f"f{number}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
    assert rows("SELECT f0.u, row_number() OVER (ORDER BY n) AS r FROM 'f0.arrow'")[0] == {"u": "007", "r": 1}
    assert [row["n"] for row in rows("FROM 'f*.arrow'")] == [0, 2, 1, 2]


def test_quotes_are_those_of_tables(rows, tmp_path):
    text = "u,y\n" + "a,1\n" * LATE
    (tmp_path / "late.csv").write_text(text + '"x,\n1",2\n"""b""",3\n\'c\',4\n#d,5\n')
    found = rows("SELECT * FROM 'late.csv'")[LATE:]
    assert found == [{"u": u, "y": y} for u, y in (("x,\n1", 2), ('"b"', 3), ("'c'", 4), ("#d", 5))]
    (tmp_path / "open.csv").write_text(text + '"x,2\n')
    with pytest.raises(UserError, match=r"read_csv\('open.csv', quote = ''\)"):
        rows("SELECT * FROM 'open.csv'")
    assert rows("SELECT u FROM read_csv('open.csv', quote = '')")[-1] == {"u": '"x'}


def test_rows_that_begin_with_a_hash(rows, tmp_path):
    (tmp_path / "f.csv").write_text('u,y\n#x,"2,3"\n#y,3\n' + "a,3\n" * 10)
    assert [row["u"] for row in rows("FROM 'f.csv'")] == ["#x", "#y", *"a" * 10]
    assert [row["u"] for row in rows("FROM read_csv('f.csv', comment = '#')")] == [*"a" * 10]
    (tmp_path / "noted.csv").write_text("u,y\na,1\nb,2\n# the end\n")
    with pytest.raises(UserError, match=r"read_csv\('noted.csv', comment = '#'\)"):
        rows("FROM 'noted.csv'")
    assert [row["u"] for row in rows("FROM read_csv('noted.csv', comment = '#')")] == ["a", "b"]


def test_empty_files_among_others(rows, tmp_path):
    (tmp_path / "f1.csv").write_text("u,y\n07,1\n")
    (tmp_path / "f2.csv").write_text("")
    assert rows("FROM 'f*.csv'") == [{"u": "07", "y": 1}]


# Files of all kinds

NUMBERS = {
    "integers": lambda rng: str(rng.randint(-5, 99)),
    "hundredths": lambda rng: f"{rng.random() * 20:.2f}",
    "tenths": lambda rng: f"{rng.randint(0, 9)}.0",
    "fractions": lambda rng: rng.choice(["3", "3.5", "10.4", "-0"]),
    "spellings": lambda rng: rng.choice(["3", "3.0", "10.40", "1e5", "2E-3", "+5", ".5"]),
    "not numbers": lambda rng: rng.choice(["nan", "NaN", "1", "2.5"]),
    "blanks": lambda rng: rng.choice(["", "1", "2"]),
    "missing": lambda rng: rng.choice(["NA", "1", "NULL", "2"]),
    "spaces": lambda rng: rng.choice([" 5", "5 ", "6"]),
    "padded": lambda rng: f"{rng.randint(0, 120):03}",
    "large": lambda rng: rng.choice(["18446744073709551615", "9223372036854775808", "5"]),
    "large and fractions": lambda rng: rng.choice(["12345678901234567890", "12345678901234567891", "1.5"]),
    "empty": lambda rng: "",
}
TEXTS = {
    "larger": lambda rng: rng.choice(["1" * 45, "1" * 44 + "2"]),
    "infinite": lambda rng: rng.choice(["inf", "1.0", "-Infinity"]),
    "underscores": lambda rng: rng.choice(["1_000", "5", "0x10"]),
    "codes": lambda rng: rng.choice(["007", "7", "12"]),
    "true": lambda rng: rng.choice(["true", "false"]),
    "True": lambda rng: rng.choice(["True", "False"]),
    "booleans": lambda rng: rng.choice(["T", "true", "F", "FALSE"]),
    "yes": lambda rng: rng.choice(["yes", "no"]),
    "dates": lambda rng: f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
    "other dates": lambda rng: f"{rng.randint(1, 28):02}/{rng.randint(1, 12):02}/2026",
    "short dates": lambda rng: f"2026-{rng.randint(1, 12)}-{rng.randint(1, 28)}",
    "times": lambda rng: f"2026-11-{rng.randint(1, 28):02} 12:{rng.randint(0, 59):02}:00",
    "times in UTC": lambda rng: f"2026-11-{rng.randint(1, 28):02}T12:{rng.randint(0, 59):02}:00Z",
    "milliseconds": lambda rng: f"2026-11-{rng.randint(1, 28):02}T12:00:00.{rng.randint(0, 999):03}Z",
    "zones": lambda rng: f"2026-11-{rng.randint(1, 28):02} 12:00:00+01:00",
    "dates and times": lambda rng: rng.choice(["2026-11-01", "2026-11-01 12:00:00", "2026-11-01T12:00"]),
    "clock": lambda rng: f"12:{rng.randint(0, 59):02}:00",
    "minutes": lambda rng: f"12:{rng.randint(0, 59):02}",
    "uuids": lambda rng: str(uuid.UUID(int=rng.choice([5 << 90, 7 << 100]))),
    "UUIDs": lambda rng: str(uuid.UUID(int=rng.choice([0xABC << 90, 0xDEF << 100]))).upper(),
    "hashes": lambda rng: rng.choice(["#1", "#2", "x"]),
    "unicode": lambda rng: rng.choice(["é", "日本", "x", "Ä"]),
    "quotes": lambda rng: rng.choice(["a,b", 'a"b', "x\ty", "c", "'d'"]),
    "json": lambda rng: rng.choice(['{"a":1}', "[1]"]),
    "backslashes": lambda rng: rng.choice(["a\\b", "\\N", "\\"]),
    "words": lambda rng: rng.choice(["a ", " a", "b", "null", "-"]),
}
KINDS = {**NUMBERS, **TEXTS}


def cell(text, delimiter):
    """Return a value as it is written in CSV."""
    return '"' + text.replace('"', '""') + '"' if any(one in text for one in (delimiter, '"', "\n")) else text


def dirty_files(rng, rows):
    """Return columns for one to three files: for each file, the texts of each column. Kinds change late or by file."""
    names = [f"c{n}" for n in range(rng.randint(2, 5))]
    kinds = {name: [rng.choice(list(KINDS))] for name in names}
    for name in names:
        if rng.random() < 0.4:
            kinds[name].append(rng.choice(list(KINDS)))
    files, late = [], rng.random() < 0.5
    for number in range(1 if rows > LATE else rng.randint(1, 3)):
        columns = {}
        for name in names:
            first, last = KINDS[kinds[name][0]], KINDS[kinds[name][-1]]
            before = rows - 100 if late else rows if number == 0 else 0
            columns[name] = [(first if row < before else last)(rng) for row in range(rows)]
        columns["y"] = [str(rng.randint(0, 1)) for _ in range(rows)]
        files.append(columns)
    numeric = [name for name in names if set(kinds[name]) <= set(NUMBERS) and rng.random() < 0.5]
    return files, numeric


def check_dirty(folder, seed, rows):
    rng = random.Random(seed)
    files, numeric = dirty_files(rng, rows)
    kind = rng.choice(["csv", "csv", "tsv", "csv.gz", "json"])
    for number, columns in enumerate(files):
        path, values = folder / f"f{number}", list(zip(*columns.values(), strict=True))
        for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
            write(
                path.with_suffix(f".{suffix}"),
                [tuple(cell(text, delimiter) for text in row) for row in [tuple(columns), *values]],
                delimiter,
            )
        with gzip.open(path.with_suffix(".csv.gz"), "wb") as file:
            file.write(path.with_suffix(".csv").read_bytes())
        lines = [json.dumps(dict(zip(columns, (text or None for text in row), strict=True))) for row in values]
        path.with_suffix(".json").write_text("\n".join(lines) + "\n")
    ids = [name for name in files[0] if name != "y" and name not in numeric]
    roles = ["--label", "y"]
    roles += ["--categorical", ",".join(ids)] if ids else []
    roles += ["--numeric", ",".join(numeric)] if numeric else []
    if not ids:
        return "without ids"
    table = run(folder / "table", "table", *[f"f{n}.csv" for n in range(len(files))], *roles)
    found = query(folder, f"'f*.{kind}'", *roles)
    if isinstance(found, str):
        if not isinstance(table, str):
            assert re.search(r"column 'c\d': .* in row [\d,]+ of f\d\.", found), found
            assert "VARCHAR" in found
        return "refused"
    assert found == table
    for n in range(len(files)):
        raw = folder / f"f{n}.csv"
        assert served(folder / "query", raw) == served(folder / "table", raw)
    return "same"


@pytest.mark.parametrize("seed", range(4))
def test_dirty_files(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    check_dirty(tmp_path, seed, 150)


@pytest.mark.slow
def test_many_dirty_files(tmp_path, monkeypatch):
    counts = collections.Counter()
    for seed in range(100, 300):
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.chdir(folder)
        counts[check_dirty(folder, seed, 150 if seed % 4 else LATE + 200)] += 1
        shutil.rmtree(folder)
    assert counts["same"] > counts["refused"]
