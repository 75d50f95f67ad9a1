"""`preprocess query`: the rows of an SQL query, in one order on any number of threads."""

import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.core.errors import TransientError, UserError
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.query import source
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.source import QueryOptions, QueryRows, open_query
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from tests import forks
from tests.conftest import environment
from tests.data.test_restart import contents

ROWS = 60_000
HOW = TableOptions(label="y", categorical=("u", "i"))
MEMORY = 256 << 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Events with many equal times, and items, in files of many small groups of rows, so that threads share them."""
    folder = tmp_path_factory.mktemp("query")
    rng = np.random.default_rng(0)
    events = {
        "u": rng.integers(0, 900, ROWS),
        "i": rng.integers(0, 300, ROWS),
        "t": rng.integers(0, 40, ROWS),
        "p": rng.random(ROWS) * 1e3 ** rng.random(ROWS),
        "y": rng.integers(0, 2, ROWS),
    }
    pq.write_table(pa.table(events), folder / "events.parquet", row_group_size=1000)
    items = {"i": np.arange(300), "kind": [f"k{n % 7}" for n in range(300)], "price": rng.random(300)}
    pq.write_table(pa.table(items), folder / "items.parquet", row_group_size=10)
    with (folder / "events.csv").open("w") as file:
        file.write("u,i,t,p,y\n")
        for row in zip(*(values.tolist() for values in events.values()), strict=True):
            file.write(",".join(map(str, row)) + "\n")
    return folder


@pytest.fixture
def query(data, tmp_path, monkeypatch):
    """Open a query in the folder of the data."""
    monkeypatch.chdir(data)

    def opened(sql, threads=2, **tables):
        return QueryRows(sql, Engine(threads, MEMORY, tmp_path / "spill", tables), threads)

    return opened


def rows_of(opened):
    """Return all rows as a table."""
    parts = [part.content for part in opened.parts(opened.names, 0)]
    return pa.Table.from_batches(parts).combine_chunks()


QUERIES = {
    "scan": ("SELECT * FROM 'events.parquet'", True),
    "text": ("SELECT u, i, y FROM 'events.csv' WHERE t > 10", True),
    "union": ("SELECT u FROM 'events.parquet' UNION ALL SELECT i FROM 'items.parquet'", True),
    "sorted union": ("SELECT u, t FROM 'events.parquet' UNION ALL SELECT i, 3 FROM 'items.parquet' ORDER BY t", True),
    "union without repeats": ("SELECT u FROM 'events.parquet' UNION SELECT i FROM 'items.parquet'", True),
    "union of all": ("FROM 'events.parquet' UNION FROM 'events.parquet'", True),
    "with": ("WITH a AS (SELECT u, t FROM 'events.parquet') SELECT * FROM a WHERE t < 3", True),
    "limit": ("SELECT * FROM 'events.parquet' LIMIT 30000", True),
    "drawn": ("SELECT * FROM 'events.parquet' WHERE draw(concat(u, i, t), 2020) < 0.3", True),
    "join": ("SELECT e.*, kind FROM 'events.parquet' e JOIN 'items.parquet' USING (i)", True),
    "ties": ("SELECT u, i FROM 'events.parquet' ORDER BY t", True),
    "some of the ties": ("SELECT * FROM (SELECT * FROM 'events.parquet' ORDER BY t LIMIT 1234) WHERE u > 5", True),
    "sorted inside": ("SELECT u, i FROM (SELECT * FROM 'events.parquet' ORDER BY t) WHERE u > 5", True),
    "in": ("SELECT u, t FROM 'events.parquet' WHERE i IN (SELECT i FROM 'items.parquet' WHERE kind = 'k1')", True),
    "distinct": ("SELECT DISTINCT u, t FROM 'events.parquet'", True),
    "one of each": ("SELECT DISTINCT ON (u) * FROM 'events.parquet' ORDER BY u, t DESC", True),
    "numbered": ("SELECT *, row_number() OVER (PARTITION BY u ORDER BY t) AS n FROM 'events.parquet'", True),
    "numbered after a join": (
        "SELECT e.u, e.y, lag(e.i) OVER (PARTITION BY u ORDER BY t) AS before, kind "
        "FROM 'events.parquet' e JOIN 'items.parquet' x ON e.i = x.i",
        True,
    ),
    "numbered groups": ("SELECT u, row_number() OVER (ORDER BY count(*)) AS n FROM 'events.parquet' GROUP BY u", True),
    "lists": ("SELECT u, list(i ORDER BY t) AS l, first(i ORDER BY t) AS f FROM 'events.parquet' GROUP BY u", True),
    "histories": ("SELECT u, i, y, last_items(i, u, t, 4) AS h FROM 'events.parquet'", True),
    "last out": (
        "SELECT * FROM 'events.parquet' QUALIFY row_number() OVER (PARTITION BY u ORDER BY t DESC) = 1",
        True,
    ),
    "whole sums": ("SELECT u, sum(y) AS s, count(*) AS n, avg(t) AS m FROM 'events.parquet' GROUP BY ALL", True),
    "exact sums": ("SELECT u, avg(p::DECIMAL(18, 6)) AS m FROM 'events.parquet' GROUP BY u", True),
    "ordered sums": ("SELECT u, sum(p ORDER BY p) AS m FROM 'events.parquet' GROUP BY u", True),
    "rounded sums": ("SELECT u, avg(p) AS m FROM 'events.parquet' GROUP BY u", False),
    "moving sums": (
        "SELECT u, sum(p) OVER (PARTITION BY u ORDER BY t ROWS 5 PRECEDING) AS m FROM 'events.parquet'",
        False,
    ),
    "any of them": ("SELECT u, any_value(i) AS a, list(i) AS l FROM 'events.parquet' GROUP BY u", False),
    "all of a macro": ("SELECT u, arg_max(i, t) AS a FROM 'events.parquet' GROUP BY ALL", False),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("sql", "many"), QUERIES.values(), ids=QUERIES)
def test_the_same_rows_on_any_number_of_threads(query, sql, many):
    """`many`: the query may have many threads; otherwise the result could depend on them."""
    opened = [query(sql, threads) for threads in (1, 2, 5)]
    assert [not one.doubts for one in opened] == [many] * 3
    first, *others = map(rows_of, opened)
    assert len(first)
    assert all(first.equals(other) for other in others)


@pytest.mark.parametrize(
    ("sql", "order"),
    [
        ("SELECT * FROM 'events.parquet'", "of their files"),
        ("SELECT * FROM 'events.parquet' ORDER BY t", "of its ORDER BY, then of all columns"),
        ("SELECT u FROM (SELECT * FROM 'events.parquet' ORDER BY t)", "of its ORDER BY, then of all columns"),
        ("SELECT count(*) FROM 'events.parquet' GROUP BY u", "of all columns, from left to right"),
    ],
)
def test_what_orders_the_rows_is_said(query, capsys, sql, order, tmp_path):
    assert query(sql).order == order
    open_query(sql, QueryOptions(2, MEMORY, tmp_path / "spill"))
    assert capsys.readouterr().err == f"query: rows in the order {order}; 256.0 MiB of memory\n"


def test_the_order_of_a_file_is_kept(query, data):
    assert rows_of(query("FROM 'events.parquet'", 5)).equals(pq.read_table(data / "events.parquet").combine_chunks())


def test_a_doubt_is_said(data, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(data)
    open_query("SELECT avg(p) FROM 'events.parquet'", QueryOptions(2, MEMORY, tmp_path / "spill"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == (
        "query: one thread, because several could change the result: avg() adds floating-point numbers "
        "(avg(x::DECIMAL(18, 6)) is exact)"
    )
    open_query("SELECT avg(p) FROM 'events.parquet'", QueryOptions(1, MEMORY, tmp_path / "spill"))
    assert "thread" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT random() FROM 'events.parquet'", r"line 1, 'random\(\)'.* write draw\(id, 2020\)"),
        ("SELECT u\nFROM 'events.parquet' WHERE t <\n now()", r"line 3, 'now\(\)'.*a fixed time"),
        ("SELECT current_date FROM 'events.parquet'", "current_date.*a different value in each run"),
        ("SELECT uuid() FROM 'events.parquet'", r"write md5\(id\)"),
        ("SELECT * FROM 'events.parquet' USING SAMPLE 10", r"sample .*WHERE draw\(id, 2020\) < 0.1"),
        ("SELECT * FROM 'events.parquet' TABLESAMPLE 10%", "sample"),
        ("SELECT 1; SELECT 2", "has 2 statements; give one SELECT"),
        (" ", "is empty; give one SELECT"),
        ("FROM 'items.parquet' UNION FROM 'items.parquet' ORDER BY 1", "names of its columns; write them instead of"),
        ("CREATE TABLE a (b INT)", "only SELECT can be read"),
        ("SELECT *\nFROM", r"syntax error .*\(line 2\)"),
        ("SELECT nothing FROM 'events.parquet'", 'column "nothing" not found'),
        ("SELECT * FROM 'none.parquet'", "No files found .*none.parquet"),
        ("FROM read_parquet('items' || '.parquet')", "the first argument must be a file's name, or a list of names"),
    ],
)
def test_a_query_that_cannot_be(query, sql, words):
    with pytest.raises(UserError, match=words) as error:
        query(sql)
    assert "\n" not in str(error.value)


def test_a_value_that_cannot_be_read_is_named(query, tmp_path):
    opened = query("SELECT u::VARCHAR || 'x' AS u, (u || 'x')::INT AS v FROM 'events.parquet'")
    with pytest.raises(UserError, match="the query failed: .*Could not convert string '.*x' to INT32"):
        rows_of(opened)
    table = TableSource([query("SELECT 2 AS y, 'a' AS u, 'b' AS i")], HOW)
    with pytest.raises(UserError, match="the query:1: column 'y': '2' is not 0 or 1"):
        build(table, tmp_path / "out", Options())


def test_the_functions_for_recommenders(query, data):
    drawn = rows_of(query("SELECT draw(range, 2020) AS d, draw(range, 1) AS e, draw('a', 0) AS a FROM range(5000)"))
    values, others = drawn["d"].to_numpy(), drawn["e"].to_numpy()
    assert 0 <= values.min() < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(values, others)[0, 1]) < 0.05
    assert values[:2].tolist() == [0.18080632752166292, 0.583379621630317]  # of any version and machine
    events = pq.read_table(data / "events.parquet").to_pylist()
    by_user = {}
    for row in events:
        by_user.setdefault(row["u"], []).append((row["t"], row["i"]))
    sql = "SELECT u, t, i, last_items(i, u, t, 3) AS h FROM 'events.parquet' WHERE u < 9"
    for row in rows_of(query(sql)).to_pylist():
        before = sorted(one for one in by_user[row["u"]] if one[0] < row["t"])
        assert row["h"] == [item for _, item in before[-3:]]


def test_the_data_set_is_that_of_the_table(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data)
    roles = ("--label", "y", "--categorical", "u,i", "--numeric", "p", "--test-after", "t=30", "--threads", "2")
    preprocess.main(["table", "events.csv", "--out", str(tmp_path / "table"), *roles])
    preprocess.main(["query", "FROM 'events.csv'", "--out", str(tmp_path / "query"), *roles])
    assert shards_of(tmp_path / "query") == shards_of(tmp_path / "table")
    (tmp_path / "q.sql").write_text("SELECT * -- all of it\nFROM 'events.csv'\n")
    preprocess.main(["query", "--query", str(tmp_path / "q.sql"), "--out", str(tmp_path / "file"), *roles])
    assert shards_of(tmp_path / "file") == shards_of(tmp_path / "table")
    found = manifest.read(tmp_path / "file")
    [origin] = found.sources
    assert origin["query"] == "SELECT * -- all of it\nFROM 'events.csv'"
    assert origin["files"] == [{"file": str(data / "events.csv"), "bytes": (data / "events.csv").stat().st_size}]
    preprocess.main(["check", str(tmp_path / "file")])


def shards_of(folder):
    """Return the contents of a data set but for the manifest, which has the command."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"}


def test_new_data_with_the_ids_of_earlier_data(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(data)
    roles = ("--label", "y", "--categorical", "u,i")
    for number, sql in enumerate(("FROM 'events.csv' WHERE u < 500", "FROM 'events.csv' WHERE u > 400")):
        more = roles if not number else ("--vocabulary", str(tmp_path / "0"))
        preprocess.main(["query", sql, "--out", str(tmp_path / str(number)), *more])
    old, new = (manifest.read(tmp_path / str(number)).schema for number in (0, 1))
    assert new.rows > old.rows
    assert " kept from " in capsys.readouterr().out


def test_tables_of_this_process(query, tmp_path):
    frame = pa.table({"u": ["a", "b"], "w": [1, 2]})
    assert rows_of(query("SELECT u FROM frame WHERE w = 2", frame=frame)).to_pylist() == [{"u": "b"}]
    with pytest.raises(UserError, match="frame"):  # not whatever is in the caller's scope
        query("SELECT u FROM frame")


def test_flags_that_do_not_go_together(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data)
    out = ("--out", str(tmp_path / "out"), "--label", "y", "--categorical", "u")
    for more, words in (
        ((), "neither is given"),
        (("FROM 'events.csv'", "--query", "events.csv"), "both are given"),
        (("--query", "none.sql"), "--query none.sql: the file cannot be read .*No such file"),
        (("FROM 'events.csv'", "--query-memory", "1MiB"), "--query-memory must be at least 64.0 MiB, not 1.0 MiB"),
    ):
        with pytest.raises(UserError, match=words):
            preprocess.main(["query", *more, *out])
    with pytest.raises(UserError, match="has no column 'z'; it has u, i, t, p, y"):
        preprocess.main(["query", "FROM 'events.csv'", "--out", str(tmp_path / "o"), "--label", "y", "--bag", "z=,"])


def test_a_join_that_repeats_rows_is_noted(query, data, capsys):
    """Rows in, rows out; only of joins whose other side repeats keys, whichever side DuckDB takes first."""
    items = pq.read_table(data / "items.parquet")
    pq.write_table(pa.concat_tables([items, items.slice(0, 3)]), data / "twice.parquet")
    kept = "SELECT e.*, kind FROM 'events.parquet' e LEFT JOIN (SELECT DISTINCT i, kind FROM 'twice.parquet') USING (i)"
    assert len(rows_of(query(kept))) == ROWS
    assert capsys.readouterr().err == ""
    opened = query("WITH e AS (FROM 'events.parquet') SELECT e.*, kind FROM e LEFT JOIN 'twice.parquet' x ON e.i = x.i")
    after = len(rows_of(opened))
    assert after > ROWS
    [line] = capsys.readouterr().err.splitlines()
    assert all(text in line for text in ("join on i = i", f"{after:,}", f"{ROWS:,}"))
    rows_of(opened)
    assert capsys.readouterr().err == ""
    rows_of(query("SELECT x.i, u FROM 'items.parquet' x JOIN 'events.parquet' e USING (i)"))  # a smaller first input
    assert "from 300," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("hour(to_timestamp(1600000000000 + t))", "to_timestamp.* milliseconds.*epoch_ms.*16000000000"),
        ("make_timestamp_ms(1600000000000000 + t)", "make_timestamp_ms.* microseconds.*16000000000"),
    ],
)
def test_a_time_in_the_wrong_unit(query, call, words):
    with pytest.raises(UserError, match=words):
        rows_of(query(f"SELECT {call} AS h FROM 'events.parquet'"))


def test_times_in_the_right_unit(query):
    same = "to_timestamp(1600000000) = make_timestamp_ms(1600000000000)::TIMESTAMPTZ"
    sql = f"SELECT {same} AS a, TRY(to_timestamp(2e12)) AS b"
    assert rows_of(query(sql)).to_pylist() == [{"a": True, "b": None}]


def test_negative_zero(query, tmp_path):
    """-0.0 ties with 0.0; a plain scan keeps it."""
    frame = pa.table({"n": [1, 1, 2, 2], "p": [0.0, -0.0, -0.0, 0.0]})
    plain = rows_of(query("FROM frame", frame=frame))
    assert plain.equals(frame)
    assert str(plain["p"].to_pylist()) == "[0.0, -0.0, -0.0, 0.0]"
    for sql in ("FROM frame ORDER BY n", "SELECT n, list(p) AS p FROM frame GROUP BY n", "SELECT max(p) FROM frame"):
        assert "-" not in str(rows_of(query(sql, frame=frame)).to_pylist())


def test_rows_that_tie_are_not_written_to_disk(data, tmp_path, monkeypatch):
    """Which of the tied rows comes first could depend on how much fits in memory."""
    monkeypatch.chdir(data)
    sql = (
        "SELECT a.u, b.i FROM (FROM 'events.parquet', range(40)) a "
        "ASOF JOIN (FROM 'events.parquet', range(40)) b ON a.u = b.u AND a.t >= b.t"
    )
    rows = QueryRows(sql, Engine(1, 64 << 20, tmp_path / "spill"), 1)
    with pytest.raises(TransientError, match="rows that tie.*--query-memory"):
        rows_of(rows)


def build_it(folder, threads, sql="SELECT e.*, kind FROM 'events.parquet' e JOIN 'items.parquet' USING (i)"):
    """Build a data set from a query."""
    rows = QueryRows(sql, Engine(threads, MEMORY, source.spill_folder(folder)), threads)
    return build(TableSource([rows], HOW), folder, Options(), threads=threads)


def test_work_is_kept_after_an_interruption(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(data)
    monkeypatch.setattr("hostdev.data.preprocess.files.CHUNK_ROWS", 7000)
    build_it(tmp_path / "straight", 2)
    taken = []

    def stop(self, part, used, parse=QueryRows.parse):
        taken.append(part.offset)
        if len(taken) == 6:
            raise KeyboardInterrupt
        return parse(self, part, used)

    with monkeypatch.context() as patched:
        patched.setattr(QueryRows, "parse", stop)
        with pytest.raises(KeyboardInterrupt):
            build_it(tmp_path / "out", 1)
    assert "the same command resumes from there" in capsys.readouterr().err
    starts = []
    parts = QueryRows.parts
    monkeypatch.setattr(
        QueryRows, "parts", lambda self, used, offset: starts.append(offset) or parts(self, used, offset)
    )
    build_it(tmp_path / "out", 2)
    assert starts[0] > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_file_that_changes(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("y,u,i\n0,a,b\n1,c,d\n")
    rows = QueryRows("FROM 't.csv'", Engine(1, MEMORY, tmp_path / "spill"), 1)
    (tmp_path / "t.csv").write_text("y,u,i\n0,a,b\n1,c,d\n1,e,f\n")
    with pytest.raises(UserError, match="a file changed while it was read"):
        build(TableSource([rows], HOW), tmp_path / "out", Options(test_fraction=0))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_the_query_runs(data, tmp_path, number):
    """The query joins each event with all others of its time, and has no row before it has seen them all."""
    sql = (
        "SELECT a.u % 100 AS u, b.i % 30 AS i, max(a.y) AS y, count(*) AS n FROM 'events.parquet' a "
        "JOIN 'events.parquet' b ON a.t % 4 = b.t % 4 GROUP BY ALL"
    )
    given = [sys.executable, "-m", "hostdev.data.preprocess", "query", sql, "--label", "y", "--categorical", "u,i"]
    started = forks.Popen(
        [*given, "--out", str(tmp_path / "out")],
        cwd=data,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = started.stderr.readline()
    assert line.startswith("query: rows in the order")
    time.sleep(0.5)  # so that the query, which takes seconds, has begun
    started.send_signal(number)
    _, err = started.communicate(timeout=60)
    if number == signal.SIGINT:
        assert started.returncode == 130
        assert "Traceback" not in err
        assert not list(tmp_path.glob(".out*"))
    else:
        assert started.returncode == -signal.SIGKILL


def test_more_than_the_memory(data, tmp_path, monkeypatch):
    """The query sorts more than fits; what it writes to disk is gone at the end."""
    monkeypatch.chdir(data)
    sql = "SELECT a.*, repeat('x', 200) || b.i AS u2 FROM 'events.parquet' a JOIN 'items.parquet' b ON b.i < 12"
    rows = QueryRows(sql, Engine(1, 96 << 20, tmp_path / "spill"), 1)
    assert sum(len(part.content) for part in rows.parts(("u", "u2"), 0)) == 12 * ROWS
    rows = QueryRows(
        "SELECT list(a.p) AS l FROM 'events.parquet' a, range(300)", Engine(1, 64 << 20, tmp_path / "s"), 1
    )
    with pytest.raises(TransientError, match="give it more --query-memory"):
        list(rows.parts(("l",), 0))
