"""Queries for tests: every function that DuckDB lists, and statements of every kind, drawn by a seed."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 4_000


def write_data(folder):
    """Write events with many ties and special values, in small groups of rows, so that threads share them."""
    rng = np.random.default_rng(0)
    epoch = datetime.datetime(2026, 1, 1)
    n = rng.integers(0, 300, ROWS)
    p = rng.random(ROWS) * 1e3 ** rng.random(ROWS)
    p[rng.integers(0, ROWS, 99)] = np.nan
    words = [f"w{value % 40} {value % 7}" for value in n]
    events = {
        "k": rng.integers(0, 50, ROWS),
        "n": n,
        "b": n % 3 == 0,
        "p": p,
        "s": [None if value % 11 == 0 else word for value, word in zip(n, words, strict=True)],
        "t": [epoch + datetime.timedelta(hours=int(value)) for value in rng.integers(0, 60, ROWS)],
        "l": [[int(one) for one in rng.integers(0, 9, value % 5)] for value in n],
        "ls": [word.split(" ") for word in words],
        "st": [{"a": int(value), "c": word} for value, word in zip(n, words, strict=True)],
    }
    pq.write_table(pa.table(events), folder / "events.parquet", row_group_size=250)
    items = {"n": np.r_[np.arange(300), np.arange(20)], "kind": [f"k{one % 7}" for one in range(320)]}
    pq.write_table(pa.table(items), folder / "items.parquet", row_group_size=50)
    lines = [f"{k},{n},{t}" for k, n, t in zip(events["k"], n, events["t"], strict=True)]
    (folder / "log.csv").write_text("\n".join(["k,n,t", *lines]) + "\n")
    few = np.arange(900)  # a table with the name of one of its columns
    pq.write_table(pa.table({"n": few % 300, "w": few % 3, "d": few}), folder / "n.parquet", row_group_size=20)


VALUES = {
    "BOOLEAN": ("b", "true"),
    **dict.fromkeys(("TINYINT", "UTINYINT"), ("(n % 100)::TINYINT",)),
    **dict.fromkeys(("SMALLINT", "INTEGER", "USMALLINT", "UINTEGER"), ("n::INTEGER", "3", "(n % 5)::INTEGER")),
    **dict.fromkeys(("BIGINT", "UBIGINT", "HUGEINT", "UHUGEINT", "BIGNUM"), ("n", "(n % 5)", "2")),
    **dict.fromkeys(("FLOAT", "DOUBLE"), ("p", "0.5")),
    "DECIMAL": ("p::DECIMAL(18, 3)",),
    "VARCHAR": ("s", "'a'", "'%d'", "'sum'", "'UTC'"),
    "BLOB": ("s::BLOB",),
    "BIT": ("'0101'::BIT",),
    "UUID": ("md5(s)::UUID",),
    "DATE": ("t::DATE",),
    "TIME": ("t::TIME",),
    "TIMESTAMP": ("t",),
    "TIMESTAMP WITH TIME ZONE": ("t::TIMESTAMPTZ",),
    "INTERVAL": ("to_days((n % 30)::INTEGER)",),
    "JSON": ("to_json(st)", "to_json(l)"),
    "LAMBDA": ("lambda x: x", "lambda x, y: x"),
    "MAP": ("map([n], [s])",),
    "STRUCT": ("st",),
    "VARCHAR[]": ("ls",),
    "DOUBLE[]": ("l::DOUBLE[]",),
    "LIST": ("l", "ls"),
    "ARRAY": ("[p, n, 1]::DOUBLE[3]",),
    "ANY": ("n", "s", "p", "t", "l", "b"),
}


def value(kind, rng):
    """Return an expression of about this type."""
    kind = str(kind or "ANY")
    for name in (kind, kind.partition("(")[0]):
        if name in VALUES:
            return rng.choice(VALUES[name])
    if kind.endswith("[]"):
        return rng.choice(VALUES["LIST"])
    return rng.choice(VALUES["ARRAY" if kind.endswith("]") else "ANY"])


def functions(connection, rng):
    """Yield (name, kind, query) for every function of DuckDB's catalogue, with one of its overloads."""
    rows = connection.execute(
        "SELECT function_name, function_type, coalesce(parameter_types, []), varargs FROM duckdb_functions() "
        "WHERE internal ORDER BY ALL"
    ).fetchall()
    by_name = {}
    for name, kind, types, more in rows:
        by_name.setdefault((name, kind), []).append([*types, *([more] * 2 if more else ())])
    for (name, kind), overloads in by_name.items():
        yield name, kind, query_of(name, kind, rng.choice(overloads), rng)


def query_of(name, kind, types, rng):
    """Return a query that calls a function."""
    if kind in ("table", "table_macro", "pragma"):
        named = ", ".join(f"'{rng.choice(FILES)}'" if one in ("VARCHAR", None) else value(one, rng) for one in types)
        extra = {
            "enable_profiling": "save_location = 'watched/a.json'",
            "enable_logging": "storage = 'file', storage_path = 'watched/a.csv'",
        }.get(name, named)
        call = f'"{name}"({extra})'
        return f"PRAGMA {call}" if kind == "pragma" else f"SELECT * FROM {call}"
    given = ", ".join(value(one, rng) for one in types)
    if not name[0].isalpha() and not name.startswith("_") and len(types) == 2:
        call = f"({value(types[0], rng)}) {name} ({value(types[1], rng)})"
    else:
        call = f'"{name}"({given})'
    if kind == "window":
        frame = rng.choice(("", " ROWS 2 PRECEDING", " GROUPS 1 PRECEDING", " RANGE INTERVAL 1 HOUR PRECEDING"))
        return f"SELECT k, n, {call} OVER (PARTITION BY k ORDER BY t{frame}) AS v FROM 'events.parquet'"
    if kind == "aggregate":
        inner = f'"{name}"({given} ORDER BY t)'
        return rng.choice(
            (
                f"SELECT k, {call} AS v FROM 'events.parquet' GROUP BY k",
                f"SELECT {call} AS v FROM 'events.parquet'",
                f"SELECT k, {inner} AS v FROM 'events.parquet' GROUP BY k",
                f"SELECT k, n, {call} OVER (PARTITION BY k ORDER BY t) AS v FROM 'events.parquet'",
                f"SELECT k, n, {call} OVER (PARTITION BY k ORDER BY t ROWS 3 PRECEDING) AS v FROM 'events.parquet'",
            )
        )
    return rng.choice(
        (
            f"SELECT n, {call} AS v FROM 'events.parquet'",
            f"SELECT {call} AS v, count(*) AS c FROM 'events.parquet' GROUP BY 1",
            f"SELECT DISTINCT {call} AS v FROM 'events.parquet' JOIN 'items.parquet' USING (n)",
        )
    )


FILES = ("watched/a.json", "watched/a.csv", "watched/a.parquet", "watched/a.txt", "watched/a.db", "events.parquet")
SCALARS = ("k", "n", "s", "t", "p", "upper(s)", "n + k", "hour(t)", "l", "st.a", "len(ls)", "CASE WHEN b THEN n END")
AGGREGATES = (
    *(
        "count(*)",
        "sum(n)",
        "max(p)",
        "avg(p)",
        "list(n)",
        "list(n ORDER BY t)",
        "first(s)",
        "arg_max(n, t)",
        "mode(k)",
    ),
    *("string_agg(s, ',' ORDER BY t)", "any_value(s)", "approx_count_distinct(n)", "median(p)", "stddev(n)", "min(s)"),
    *("count(DISTINCT n)", "sum(p) FILTER (n > 9)", "quantile_cont(p, 0.3)", "last(n ORDER BY t)", "histogram(k)"),
    *("approx_quantile(p, 0.5)", "reservoir_quantile(p, 0.5)", "entropy(n)", "arg_min(s, t, 3)", "geomean(p)"),
    *("list(DISTINCT n)", "max(n, 3)", "product(n + 1)", "approx_top_k(n, 3)", "bit_xor(n)", "corr(p, n)"),
)
WINDOWED = (
    *("row_number()", "rank()", "lag(s)", "lead(n, 2)", "first_value(n)", "last_value(s)", "nth_value(n, 2)"),
    *("ntile(7)", "sum(n)", "sum(p)", "list(n)", "count(*)", "dense_rank()", "cume_dist()", "max(s)", "arg_max(n, p)"),
    *("last_value(s IGNORE NULLS)", "first_value(n ORDER BY p)", "mode(n)", "any_value(s)", "avg(n)", "string_agg(s)"),
)
FRAMES = (
    *("", "", "ROWS 3 PRECEDING", "ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING", "GROUPS 1 PRECEDING"),
    *("ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING", "ROWS 2 PRECEDING EXCLUDE TIES"),
    *("GROUPS BETWEEN 2 PRECEDING AND CURRENT ROW EXCLUDE GROUP", "RANGE INTERVAL 2 HOUR PRECEDING"),
)
EVENTS = "'events.parquet'"
SOURCES = (
    *(f"{EVENTS} e", f"{EVENTS} e", f"(SELECT * FROM {EVENTS} WHERE n > 20) e", "a e", f"(FROM {EVENTS} ORDER BY t) e"),
    *(f"(SELECT * FROM {EVENTS} ORDER BY t LIMIT 5000) e", f"(SELECT * FROM {EVENTS} LIMIT 5000 OFFSET 99) e"),
    *(
        f"(SELECT DISTINCT ON (n, k) * FROM {EVENTS}) e",
        f"(FROM {EVENTS} UNION ALL FROM A) e",
        "(FROM a UNION FROM a) e",
    ),
    *(f"{EVENTS} e JOIN 'items.parquet' i USING (n)", f"{EVENTS} e LEFT JOIN 'items.parquet' i ON i.n = e.n % 400"),
    *(f"{EVENTS} e SEMI JOIN 'items.parquet' i USING (n)", f"{EVENTS} e ANTI JOIN 'n.parquet' i ON e.k = i.n"),
    *(
        f"{EVENTS} e FULL JOIN 'n.parquet' i USING (n)",
        f"'n.parquet' i RIGHT JOIN {EVENTS} e USING (n)",
        f"{EVENTS} e, range(2) r",
    ),
    *(f"{EVENTS} e NATURAL JOIN 'items.parquet'", f"{EVENTS} e CROSS JOIN (SELECT max(kind) m FROM 'items.parquet')"),
    f"{EVENTS} e ASOF JOIN (SELECT k AS k2, t AS t2, n AS n2 FROM {EVENTS} WHERE b) x ON e.k = x.k2 AND e.t >= x.t2",
    f"{EVENTS} e ASOF LEFT JOIN 'log.csv' x USING (k, t)",
    f"{EVENTS} e POSITIONAL JOIN 'items.parquet' i",
    f"{EVENTS} e, LATERAL (SELECT unnest(e.l) AS one)",
    f"{EVENTS} e, LATERAL (SELECT max(kind) AS m FROM 'items.parquet' i WHERE i.n = e.n)",
    f"{EVENTS} e JOIN {EVENTS} f ON e.k = f.k AND e.t < f.t AND f.n < 3",
    f"(SELECT *, unnest(l) AS one FROM {EVENTS}) e",
    f"{EVENTS} e TABLESAMPLE 10%",
    f"(FROM {EVENTS} UNION ALL BY NAME FROM 'items.parquet') e",
    f"(PIVOT {EVENTS} ON b IN (true, false) USING first(p) GROUP BY k, n, s, t, l, st, ls, b) e",
)
WITHS = (
    f"WITH a AS (SELECT * FROM {EVENTS} WHERE k < 40) ",
    f"WITH a AS MATERIALIZED (SELECT e.* FROM {EVENTS} e JOIN 'items.parquet' i USING (n)) ",
    f"WITH RECURSIVE c AS (SELECT 0 AS d UNION ALL SELECT d + 1 FROM c WHERE d < 2), "
    f"a AS (SELECT e.* FROM {EVENTS} e, c) ",
    f"WITH A AS (SELECT DISTINCT * FROM {EVENTS}) ",
)
CONDITIONS = (
    *(
        "n > 30",
        "k IN (SELECT n FROM 'n.parquet' WHERE w = 1)",
        "s LIKE 'w1%'",
        "draw(n, 1) < 0.5",
        "b OR p < 9",
        "t IS NULL",
    ),
    *(
        f"n < (SELECT median(n) FROM {EVENTS})",
        "EXISTS (SELECT 1 FROM 'items.parquet' i WHERE i.n = e.n)",
        "random() < 1",
    ),
)


def statement(rng):
    """Return a query with parts drawn at random."""
    source = rng.choice(SOURCES)
    prefix = rng.choice(WITHS) if " a" in source or "FROM A" in source or "(FROM a" in source or source == "a e" else ""
    where = f" WHERE {rng.choice(CONDITIONS)}" if rng.random() < 0.3 else ""
    kind = rng.random()
    if kind < 0.35:
        keys = rng.sample(("e.k", "hour(e.t)", "e.b"), rng.randint(0, 2))
        chosen = [f"{one} AS a{n}" for n, one in enumerate(rng.sample(AGGREGATES, rng.randint(1, 3)))]
        group = f" GROUP BY {rng.choice((', '.join(keys), ', '.join(str(n + 1) for n in range(len(keys))), 'ALL'))}"
        body = f"SELECT {', '.join([*keys, *chosen])} FROM {source}{where}{group if keys else ''}"
        if keys and rng.random() < 0.3:
            body = body.replace(" FROM ", ", row_number() OVER (ORDER BY count(*)) AS r FROM ", 1)
    elif kind < 0.75:
        order = rng.choice(("ORDER BY e.t", "ORDER BY e.b DESC", "PARTITION BY e.k ORDER BY e.t", "PARTITION BY e.k"))
        over = f"{rng.choice(WINDOWED)} OVER ({order} {rng.choice(FRAMES)})"
        body = f"SELECT e.k, e.n, {over} AS v FROM {source}{where}"
        if rng.random() < 0.3:
            body += f" QUALIFY row_number() OVER ({order}) < 3"
    else:
        chosen = rng.choice(("*", "DISTINCT e.k, e.n", "DISTINCT ON (e.k) e.k, e.n", "e.*", "DISTINCT ON (e.t) *"))
        if rng.random() < 0.4:
            chosen = ", ".join(f"{one} AS c{n}" for n, one in enumerate(rng.sample(SCALARS, 3)))
        body = f"SELECT {chosen} FROM {source}{where}"
        if rng.random() < 0.2:
            body += f" {rng.choice(('UNION', 'EXCEPT', 'INTERSECT', 'UNION ALL', 'UNION BY NAME'))} {body}"
    if rng.random() < 0.3:
        body += f" ORDER BY {rng.choice(('1', '1 DESC', 'ALL', '2, 1'))}"
    if rng.random() < 0.25:
        body += f" LIMIT {rng.choice((1, 500, '10%'))}{rng.choice(('', ' OFFSET 7'))}"
    return prefix + body
