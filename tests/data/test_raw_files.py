"""Files of raw rows are read for predictions as a query read the files of the data set."""

import gzip
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.core.errors import UserError
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.raw_files import RawFile
from hostdev.data.preprocess.query.raw_rows import RawQuery, find_source
from hostdev.data.preprocess.query.source import QueryRows
from tests.data.test_query import rows_of

MEMORY = 256 << 20


class Needs:
    """What a query needs of an encoding."""

    separators, numeric_columns = {}, set()

    def __init__(self, *names, text=()):
        self._names, self.text_columns = list(names), set(text)

    def columns(self):
        return self._names


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda **tables: Engine(1, MEMORY, tmp_path / "spill", tables)


def describe(engine, sql, **tables):
    """Return a query's rows, and the manifest's entry about it as JSON keeps it."""
    opened = QueryRows(sql, engine(**tables), 1)
    return rows_of(opened), json.loads(json.dumps(opened.input.describe()))


def read_raw(engine, path, entry, wanted, query=None):
    """Return the columns of a file of raw rows; `wanted` are their names, or the schema that they had in training."""
    text = [] if isinstance(wanted, list) else [one.name for one in wanted if pa.types.is_string(one.type)]
    names = wanted if isinstance(wanted, list) else wanted.names
    raw = RawFile(path, RawQuery(Needs(*names, text=text), find_source([entry]), query), [], engine())
    return pa.Table.from_batches([raw.parse(part, names).batch for part in raw.parts(names, 0)])


CSV = {
    "plain": ("log.csv", "FROM 'log.csv'", "u,n,t\n001,1,2026-01-02 03:04:05\n,,\nx,3,2026-12-31 00:00:00\n"),
    "tabs without a header": (
        "u.data",
        r"FROM read_csv('u.data', delim='\t', header=false, names=['u', 'n', 't'])",
        "001\t1\t2026-01-02 03:04:05\n\t\t\nx\t3\t2026-12-31 00:00:00\n",
    ),
    "semicolons, day first": (
        "log.csv",
        "FROM 'log.csv'",
        "u;n;t\n001;1;02/01/2026\n;;\nx;3;31/12/2026\n",
    ),
    "text alone": ("log.csv", "FROM 'log.csv'", "u,n,t\na,b,c\nd,,e\n"),
    "options": (
        "log.csv",
        "FROM read_csv('log.csv', nullstr='NA', quote='''', types={'n': 'DOUBLE'})",
        "u,n,t\n'0,1',1,2026-01-02\nNA,NA,NA\nx,3.5,2026-02-02\n",
    ),
    "Latin-1": ("log.csv", "FROM read_csv('log.csv', encoding='latin-1')", "u,n,t\né,1,2026-01-02\nx,3,2026-02-02\n"),
    "columns": (
        "log.csv",
        "FROM read_csv('log.csv', header=true, columns={'u': 'VARCHAR', 'n': 'INTEGER', 't': 'TIMESTAMP'})",
        "u,n,t\n001,1,2026-01-02\n,,\nx,3,2026-02-02\n",
    ),
    "true and false": ("log.csv", "FROM 'log.csv'", "u,n,t\ntrue,1.5,12:30:00\nfalse,,\n,2.25,23:59:59\n"),
}


@pytest.mark.parametrize(("name", "table", "text"), CSV.values(), ids=CSV)
def test_text_files(engine, tmp_path, name, table, text):
    (tmp_path / name).write_text(text, encoding="latin-1" if "latin" in table else "utf-8")
    sql = f"SELECT u, concat(u, '/', n) AS both, n, t::VARCHAR AS t, typeof(t) AS kind {table}"
    expected, entry = describe(engine, sql)
    assert read_raw(engine, tmp_path / name, entry, expected.schema).equals(expected)
    lines = text.splitlines(keepends=True)
    has_header = "header=false" not in table
    for number, line in enumerate(lines[has_header:]):  # one row suggests other types
        if line.strip(",;\t\n"):
            content = (lines[0] if has_header else "") + line
            (tmp_path / f"one-{name}").write_text(content, encoding="latin-1" if "latin" in table else "utf-8")
            found = read_raw(engine, tmp_path / f"one-{name}", entry, expected.schema)
            assert found.equals(expected.slice(number, 1)), line


def test_other_files_than_that_of_training(engine, tmp_path):
    rows = [{"u": "001", "n": 1, "day": "2026-01-31"}, {"u": None, "n": None, "day": None}]
    (tmp_path / "log.csv").write_text("u,n,day\n001,1,2026-01-31\n,,\n")
    sql = "SELECT concat(u, '/', n) AS a, day + 1 AS b, n FROM 'log.csv' WHERE n = 1 ORDER BY n"
    _, entry = describe(engine, sql)
    expected = engine().connection.sql("SELECT concat(u, '/', n) AS a, day + 1 AS b, n FROM 'log.csv'").to_arrow_table()
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "new.csv.gz").write_bytes(gzip.compress(b"day,n,more,u\n2026-01-31,1,x,001\n,,,\n"))
    (tmp_path / "new.tsv").write_text("n\tu\tday\n1\t001\t2026-01-31\n\t\t\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "new.parquet")
    for name in ("new.jsonl", "new.csv.gz", "new.tsv", "new.parquet"):
        found = read_raw(engine, tmp_path / name, entry, ["a", "b", "n"])
        assert found.to_pylist() == expected.to_pylist(), name
        assert found.schema.types == expected.schema.types, name


def test_types_of_parquet_files(engine, tmp_path):
    """Every type comes through unchanged, also where no row has a value."""
    types = [
        *("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "HUGEINT"),
        *("FLOAT", "DOUBLE", "DECIMAL(9,3)", "BOOLEAN", "VARCHAR", "BLOB", "DATE", "TIME", "TIMESTAMP", "TIMESTAMP_S"),
        *("TIMESTAMP_MS", "TIMESTAMP_NS", "TIMESTAMPTZ", "UUID", "BIGINT[]", "VARCHAR[]"),
        *("STRUCT(a INTEGER, b VARCHAR)", "INTEGER[3]"),
    ]  # fmt: skip
    names = [f"c{number}" for number in range(len(types))]
    texts = {"BOOLEAN": "true", "DATE": "2026-01-31", "TIME": "12:30:00", "UUID": "0" * 32, "BIGINT[]": "[1, NULL]"}
    texts |= {"VARCHAR[]": "[a]", "STRUCT(a INTEGER, b VARCHAR)": "{a: 1, b: x}", "INTEGER[3]": "[1, 2, 3]"}
    values = [
        f"'{texts.get(kind, '2026-01-31 12:00:00' if kind.startswith('TIMESTAMP') else '7')}'::{kind} AS {name}"
        for kind, name in zip(types, names, strict=True)
    ]
    nulls = [f"NULL::{kind} AS {name}" for kind, name in zip(types, names, strict=True)]
    engine().connection.sql(f"SELECT {', '.join(values)} UNION ALL SELECT {', '.join(nulls)}").write_parquet(
        "log.parquet"
    )
    sql = f"SELECT {', '.join(f'{name}, {name}::VARCHAR AS t{name}' for name in names)} FROM 'log.parquet'"
    expected, entry = describe(engine, sql)
    assert read_raw(engine, tmp_path / "log.parquet", entry, expected.schema).equals(expected)
    query = RawQuery(Needs("tc3", "tc13"), find_source([entry]))
    rows = {"c3": [7, None], "c13": ["7", None]}
    assert query.plan(["c3", "c13"]).complete(rows, lambda _, column: pa.array(column)) == {
        "tc3": ["7", None],
        "tc13": ["7", None],
    }


def test_values_of_other_types(engine, tmp_path):
    (tmp_path / "log.csv").write_text("u,n,p,b\nx,1,1.5,true\n")
    _, entry = describe(engine, "SELECT u || '' AS u2, n + 0 AS n2, p + 0 AS p2, b AND true AS b2 FROM 'log.csv'")
    plan = RawQuery(Needs("u2", "n2", "p2", "b2"), find_source([entry])).plan(["u", "n", "p", "b"])
    right = {
        "u": [pa.array([7], pa.int8()), pa.array(["7"]).dictionary_encode(), pa.array(["7"], pa.large_string())],
        "n": [pa.array([1.0]), pa.array([" 1"]), pa.array([Decimal("1.0")]), pa.array([True]), pa.array(["1"])],
        "p": [pa.array([2], pa.int32()), pa.array(["2.0"]), pa.array([Decimal("2.00")]), pa.array([2.0], pa.float32())],
        "b": [pa.array([1]), pa.array(["true"]), pa.array([1.0])],
    }  # fmt: skip
    expected = {"u2": ["7"], "n2": [1], "p2": [2.0], "b2": [True]}
    plain = {name: columns[-1] for name, columns in right.items()} | {"u": pa.array(["7"])}
    for name, columns in right.items():
        for column in columns:
            found = plan.complete({**plain, name: column}, lambda _, values: values)
            assert {key: pa.array(values).to_pylist() for key, values in found.items()} == expected
    wrong = {
        "u": [pa.array([7.0]), pa.array([True]), pa.array([b"7"])],
        "n": [pa.array([1.5]), pa.array(["1.0"]), pa.array(["1e0"]), pa.array([2**63], pa.uint64()), pa.array([[1]])],
        "p": [pa.array(["2,0"]), pa.array([b"2"])],
        "b": [pa.array([2]), pa.array(["perhaps"]), pa.array([0.5])],
    }
    for name, columns in wrong.items():
        for column in columns:
            with pytest.raises(UserError, match=rf"row 1, column '{name}'"):
                plan.complete({**plain, name: column}, lambda _, values: values)


ROW_BY_ROW = [
    "SELECT *, n * 2 AS twice FROM 'log.csv' WHERE n > 1 ORDER BY n DESC",
    "SELECT u, n + n AS twice FROM (SELECT u, n FROM 'log.csv' WHERE n < 3)",
    "WITH a AS (FROM 'log.csv'), b AS (SELECT u AS u, n AS m FROM a) SELECT u, m * 2 AS twice FROM b",
    "SELECT * EXCLUDE (n), CASE WHEN n IS NULL THEN NULL ELSE n * 2 END AS twice FROM 'log.csv' AS l",
    "FROM 'log.csv' SELECT u, list_sum([n, n])::BIGINT AS twice, row_number() OVER () AS place",
    "SELECT l.u, l.n * 2 AS twice FROM 'log.csv' l(u, n)",
]
OTHER = {
    "SELECT u, sum(n) AS twice FROM 'log.csv' GROUP BY u": "groups",
    "SELECT DISTINCT u, n * 2 AS twice FROM 'log.csv'": "DISTINCT",
    "SELECT u, n * 2 AS twice FROM 'log.csv' LIMIT 1": "LIMIT",
    "SELECT a.u, a.n * 2 AS twice FROM 'log.csv' a JOIN 'log.csv' b USING (u)": "joins",
    "SELECT u, n * 2 AS twice FROM 'log.csv' UNION ALL SELECT u, n AS twice FROM 'log.csv'": "combines",
    "SELECT u, n * (SELECT max(n) FROM 'log.csv') AS twice FROM 'log.csv'": "subquery",
    "SELECT u, sum(n) OVER (PARTITION BY u) AS twice FROM 'log.csv'": "window",
    "SELECT u, len(last_items(n, u, n, 2)) AS twice FROM 'log.csv'": "window",
    "SELECT u, unnest([n, n]) AS twice FROM 'log.csv'": "several",
    "SELECT u, n * 2 AS twice FROM 'log.csv' QUALIFY row_number() OVER (PARTITION BY u ORDER BY n) = 1": "QUALIFY",
    "SELECT u, twice FROM (SELECT u, lag(n) OVER (ORDER BY n) AS twice FROM 'log.csv')": "window",
}


@pytest.mark.parametrize("sql", ROW_BY_ROW)
def test_statements_that_are_row_by_row(engine, tmp_path, sql):
    (tmp_path / "log.csv").write_text("u,n\na,1\n,2\nb,\n")
    _, entry = describe(engine, sql)
    found = read_raw(engine, tmp_path / "log.csv", entry, ["u", "twice"])
    assert found.to_pylist() == [{"u": "a", "twice": 2}, {"u": None, "twice": 4}, {"u": "b", "twice": None}]


@pytest.mark.parametrize(("sql", "why"), OTHER.items())
def test_statements_that_are_not(engine, tmp_path, sql, why):
    (tmp_path / "log.csv").write_text("u,n\na,1\nc,2\nb,\n")
    _, entry = describe(engine, sql)
    with pytest.raises(UserError, match=f"twice.*{why}.*--query"):
        read_raw(engine, tmp_path / "log.csv", entry, ["u", "twice"])


def test_a_statement_reads_no_files(engine, tmp_path):
    """A checkpoint's query comes from whoever made the checkpoint; only the user's own statement may read files."""
    (tmp_path / "log.csv").write_text("u,n\na,1\n")
    _, entry = describe(engine, "SELECT u, n * 2 AS twice FROM 'log.csv'")
    for sql in (
        "SELECT u, (SELECT content FROM read_text('log.csv')) AS twice FROM 'log.csv'",
        "SELECT u, content AS twice FROM read_text('log.csv'), 'log.csv'",
    ):
        with pytest.raises(UserError, match="twice"):
            RawQuery(Needs("u", "twice"), find_source([{**entry, "query": sql}])).plan(["u", "n"])
    for columns in (3, {"n": 3}, {"n": {"type": "BIGINT", "format": 3}}):
        with pytest.raises(UserError, match="columns"):
            find_source([{**entry, "columns": columns}])


def test_files_that_cannot_be_read(engine, tmp_path):
    (tmp_path / "log.csv").write_text("u,n\na,1\n")
    _, entry = describe(engine, "SELECT u, n * 2 AS twice FROM 'log.csv'")
    for name, content in {"a.parquet": b"no", "b.json": b"{", "c.csv": b"u,m\na,1\n", "d.zip": b"PK"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as error:
            read_raw(engine, tmp_path / name, entry, ["u", "twice"])
        assert "\n" not in str(error.value)


def test_an_older_data_set(engine, tmp_path):
    """Its manifest has the query, but not the types of raw columns."""
    (tmp_path / "log.csv").write_text("u,n\na,1\n")
    _, entry = describe(engine, "SELECT u, n * 2 AS twice FROM 'log.csv'")
    older = {name: entry[name] for name in ("query", "engine", "files")}
    with pytest.raises(UserError, match="twice.*preprocess"):
        RawQuery(Needs("u", "twice"), find_source([older])).plan(["u", "n"])
    given = RawQuery(Needs("u", "twice"), find_source([older]), "SELECT n::INT * 2 AS twice FROM rows").plan(["u", "n"])
    assert given.complete({"u": ["a"], "n": ["3"]}, lambda _, values: values) == {"u": ["a"], "twice": [6]}
