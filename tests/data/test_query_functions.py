"""Whatever a query says, it has the same rows each time, or is refused in one line; and it changes no file."""

import ast
import functools
import random
import re
import socket
from collections import Counter

import duckdb
import pyarrow as pa
import pytest

from hostdev.core.errors import HostdevError, UserError
from hostdev.data.preprocess.query import allowed
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.source import QueryRows
from hostdev.data.preprocess.query.statement import parse
from tests.data import sql_queries

MEMORY = 512 << 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    sql_queries.write_data(folder)
    (folder / "watched").mkdir()
    for name in ("a.json", "a.csv", "a.parquet", "a.txt", "a.db", "a.sql", "a.log", "a.arrow"):
        (folder / "watched" / name).write_text("something\n")
    return folder


@pytest.fixture
def outcome(data, tmp_path, monkeypatch):
    """Return a function that returns a query's rows, or its error."""
    monkeypatch.chdir(data)
    monkeypatch.setenv("HOME", str(data))

    def found(sql, threads):
        try:
            rows = QueryRows(sql, Engine(threads, MEMORY, tmp_path / "spill"), threads)
            batches = [part.content for part in rows.parts(rows.names, 0)]
            return repr([[values_of(column) for column in batch.columns] for batch in joined(batches)])
        except HostdevError as error:
            assert "\n" not in str(error)
            return error

    return found


def joined(batches):
    """Return batches of a size that does not depend on the query's."""
    return pa.Table.from_batches(batches).combine_chunks().to_batches() if batches else []


def values_of(column):
    """Return a column's values; times as integers, because Python ends at the year 9999."""
    kind = column.type
    has_times = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    return (column.view(f"int{kind.bit_width}") if has_times else column).to_pylist()


def listing(folder):
    """Return all files with their contents and times."""
    return {
        str(path): path.is_file() and (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))
    }


def check(outcome, queries, data):
    """Run each query on one thread, and then twice on two; return the number of those that are accepted and refused."""
    before, counts, different = listing(data), Counter(), []
    for sql in queries:
        first = outcome(sql, 1)
        is_refused = isinstance(first, HostdevError)
        counts["refused" if is_refused else "accepted"] += 1
        if not is_refused and any(outcome(sql, 2) != first for _ in range(2)):
            different.append(sql)
        if listing(data) != before:
            pytest.fail(f"{sql} changed a file")
    assert not different
    return counts


CHANGING = [
    "FROM query('SELECT random() AS r')",
    "FROM query_table('events.parquet')",
    "FROM json_execute_serialized_sql(json_serialize_sql('SELECT random() AS r'))",
    "SELECT txid_current() AS t",
    "SELECT current_query_id() AS q",
    "SELECT main.random() AS r",
    "SELECT localtime AS l",
    "SELECT list_transform([1], lambda x: x + random()) AS l",
    "SELECT age(TIMESTAMP '2026-01-01') AS a",
    "SELECT ago(INTERVAL 1 DAY) AS a",
    "SELECT getenv('HOME') AS h",
    "SELECT current_setting('threads') AS c",
    "SELECT pg_postmaster_start_time() AS p",
    "SELECT version() AS v",
    "FROM duckdb_memory()",
    "FROM pragma_database_size()",
    "FROM duckdb_settings()",
    "FROM duckdb_tables",
    "FROM information_schema.tables",
    "FROM sqlite_master",
    "FROM (SUMMARIZE 'events.parquet')",
    "FROM (SHOW ALL TABLES)",
    "FROM enable_profiling(save_location = 'watched/a.json')",
    "FROM enable_logging(storage = 'file', storage_path = 'watched/a.csv')",
    "FROM sniff_csv('log.csv')",
    "FROM read_duckdb('watched/a.db')",
    "FROM 'https://localhost:1/a.csv'",
    "FROM read_parquet('s3://bucket/a.parquet')",
    "ATTACH 'watched/a.db'",
    "COPY (SELECT 1) TO 'watched/a.csv'",
    "INSTALL httpfs",
    "SET threads = 3",
    "PRAGMA enable_profiling",
    "FROM 'events.parquet' e POSITIONAL JOIN 'items.parquet' i",
    "WITH RECURSIVE c USING KEY (a) AS (SELECT 1 AS a, 2 AS b UNION SELECT a, b + 1 FROM c WHERE b < 9) FROM c",
    "SELECT s COLLATE NOCASE AS s, count(*) AS c FROM 'events.parquet' GROUP BY 1",
    "SELECT list_aggregate(l, lower('SUM')) AS a FROM 'events.parquet'",
    "SELECT ? AS a",
    "SELECT sum(n) EXPORT_STATE AS a FROM 'events.parquet'",
]


@pytest.mark.parametrize("sql", CHANGING)
def test_what_changes_between_runs_or_changes_files_is_refused(outcome, data, sql):
    before = listing(data)
    assert isinstance(outcome(sql, 1), UserError)
    assert listing(data) == before


TIES = [
    "SELECT e.k, e.t, x.n FROM 'events.parquet' e ASOF JOIN (FROM 'events.parquet' WHERE b) x USING (k, t)",
    "WITH A AS (SELECT e.* FROM 'events.parquet' e JOIN 'items.parquet' i USING (n)) FROM a",
    "SELECT k, d, lag(d) OVER (ORDER BY w) AS v FROM 'n.parquet' JOIN (SELECT DISTINCT k, n FROM 'log.csv') USING (n)",
    "SELECT d, row_number() OVER (ORDER BY n) AS v FROM 'n.parquet'",
    "SELECT d FROM 'n.parquet' QUALIFY row_number() OVER (ORDER BY n) < 99",
    "SELECT n * 100 + k AS g, row_number() OVER (ORDER BY count(*) % 2) AS v FROM 'events.parquet' GROUP BY 1",
    "SELECT k, s, count(*) AS c, row_number() OVER (ORDER BY k) AS v FROM 'events.parquet' GROUP BY ROLLUP (k, s)",
    "SELECT k, mode(n) AS v FROM 'events.parquet' GROUP BY k",
    "SELECT k, n, mode(n) OVER (PARTITION BY k ORDER BY t) AS v FROM 'events.parquet'",
    "SELECT k, n, last_value(n) OVER (PARTITION BY k ORDER BY t) AS v FROM 'events.parquet'",
    "SELECT k, n, lag(n ORDER BY t) OVER (PARTITION BY b) AS v FROM 'events.parquet'",
    "SELECT k, n, first_value(n ORDER BY t) OVER (ORDER BY b ROWS 2 PRECEDING) AS v FROM 'events.parquet'",
    "SELECT k, n, last_value(n ORDER BY t) OVER (ORDER BY b ROWS 2 PRECEDING EXCLUDE TIES) AS v FROM 'events.parquet'",
    "WITH a AS MATERIALIZED (FROM 'events.parquet' JOIN 'items.parquet' USING (n)), c AS (SELECT k, n FROM a "
    "UNION ALL SELECT k, n FROM 'events.parquet') SELECT k, row_number() OVER (ORDER BY max(k) % 3) AS r FROM c "
    "GROUP BY ALL",
    "SELECT k, string_agg(s, ',' ORDER BY t) AS v FROM 'events.parquet' GROUP BY k",
    "SELECT entropy(n) AS v, k FROM 'events.parquet' GROUP BY k",
    "FROM 'items.parquet' UNION BY NAME SELECT n % 2 AS n, s FROM 'events.parquet'",
    "SELECT k, json_group_structure((CASE WHEN b THEN '{\"a\": 1}' ELSE '{\"c\": 1}' END)::JSON) AS v "
    "FROM 'events.parquet' GROUP BY k",
]


def test_duckdb_itself_is_closed(data, tmp_path, monkeypatch):
    """What the list of functions would let through could read, write or ask nothing but the query's own files."""
    monkeypatch.chdir(data)
    before, engine = listing(data), Engine(1, MEMORY, tmp_path / "spill")
    QueryRows("SELECT * FROM 'events.parquet'", engine, 1)
    assert engine.connection.execute("SELECT count(*) > 0 FROM 'events.parquet'").fetchone() == (True,)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/a.csv"
        for sql in (
            "FROM 'items.parquet'",
            "FROM read_text('watched/a.txt')",
            f"FROM '{address}'",
            f"FROM read_csv('{address}')",
            "COPY (SELECT 1) TO 'watched/a.csv'",
            "COPY (SELECT 1) TO 'new.csv'",
            "ATTACH 'watched/new.db'",
            "EXPORT DATABASE 'watched/exported'",
            "FROM enable_profiling(save_location = 'watched/a.json')",
            "FROM enable_logging(storage = 'file', storage_path = 'watched/a.csv')",
            "INSTALL httpfs",
            "LOAD httpfs",
            "SET threads = 3",
            "SET enable_external_access = true",
            "SET allowed_directories = ['/']",
        ):
            with pytest.raises(duckdb.Error):
                engine.connection.execute(sql).fetchall()
            assert listing(data) == before, sql
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_ties_have_one_order(outcome, data):
    assert check(outcome, TIES, data)["accepted"] == len(TIES)


def test_a_window_that_gets_keys_keeps_its_frame(outcome, data):
    """The last value of a frame is of its last peer, not of the row itself."""
    sql = "SELECT hour(t) AS h, last_value(n) OVER (ORDER BY hour(t)) AS last FROM 'events.parquet'"
    [[hours, lasts]] = ast.literal_eval(outcome(sql, 2))
    assert len(set(zip(hours, lasts, strict=True))) == len(set(hours))


def test_functions_are_allowed_by_name():
    """A function that a later DuckDB adds is not allowed, nor one whose value changes."""
    connection = duckdb.connect(":memory:")
    names = connection.execute("SELECT lower(function_name), stability FROM duckdb_functions()").fetchall()
    expressions = allowed.EXPRESSIONS
    assert expressions <= {name for name, _ in names} | {"!~~", "is distinct from"}
    assert {name for name, stability in names if stability == "VOLATILE"} & expressions == {"error"}


def test_all_others_are_refused_by_name(tmp_path, monkeypatch):
    """Of DuckDB's own list, as functions in FROM and elsewhere; and the words that tell so."""
    engine = Engine(1, MEMORY, tmp_path)
    monkeypatch.setattr(engine, "rows", functools.cache(engine.rows))  # each check reads DuckDB's list
    rows = engine.rows("SELECT DISTINCT lower(function_name), function_type FROM duckdb_functions() WHERE internal")
    of_tables = {name for name, kind in rows if kind in ("table", "table_macro")}
    others = {name for name, kind in rows if kind not in ("table", "table_macro", "pragma")} - allowed.EXPRESSIONS
    made = {"generate_series", "json_each", "json_tree", "range", "repeat", "repeat_row", "unnest"}
    words = {"FROM": "in FROM is refused, because only functions that read the query's files or make rows"}
    words["SELECT"] = "is not a function that hostdev allows in a query|has a different value in each run"
    for keyword, names in (("FROM", of_tables - allowed.READERS - made), ("SELECT", others)):
        names = [name for name in sorted(names) if name.isidentifier() and name not in engine.aggregates]
        assert len(names) > 60
        for name in names:
            with pytest.raises(UserError) as refused:
                allowed.check(parse(engine.connection, f'{keyword} "{name}"(1)'), engine)
            assert re.search(words[keyword], str(refused.value)), name


@pytest.mark.parametrize("seed", [0])
def test_some_functions_and_statements(outcome, data, seed):
    rng = random.Random(seed)
    names = list(sql_queries.functions(duckdb.connect(":memory:"), rng))
    counts = check(outcome, [sql for *_, sql in rng.sample(names, 16)], data)
    counts += check(outcome, [sql_queries.statement(rng) for _ in range(12)], data)
    assert counts["accepted"] > 9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_all_functions_and_many_statements(outcome, data, seed):
    rng = random.Random(seed)
    counts = check(outcome, [sql for *_, sql in sql_queries.functions(duckdb.connect(":memory:"), rng)], data)
    counts += check(outcome, [sql_queries.statement(rng) for _ in range(400)], data)
    assert counts["accepted"] > 600
