"""The recipes of docs/guides/query.md: each runs, and gives what it promises."""

import json
import re
from collections import Counter, defaultdict
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

from hostdev.core.errors import UserError
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.source import QueryRows
from tests.conftest import ROOT
from tests.data.test_query import rows_of

GUIDE = (ROOT / "docs/guides/query.md").read_text()
SECTIONS = {
    title: re.findall(r"```sql\n(.*?)```", body, re.DOTALL)
    for title, body in re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
}
ALL = [(title, n) for title, queries in SECTIONS.items() for n in range(len(queries))]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    rng = np.random.default_rng(1)
    rows = [
        {"user": f"u{rng.integers(40)}", "item": int(60 * rng.random() ** 3), "time": int(rng.integers(500) * 3600),
         "label": int(rng.integers(2)), "price": round(float(rng.random() ** 2), 3)}
        for _ in range(1500)
    ]  # fmt: skip
    names = list(rows[0])
    lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    shown = [(f"u{n}", n, [{"item": f"N{n + k}", "clicked": k % 2} for k in range(n % 3 + 1)]) for n in range(9)]
    (folder / "impressions.json").write_text(
        "\n".join(json.dumps({"user": user, "time": time, "shown": items}) for user, time, items in shown)
    )
    texts = [f"{u},{t},{' '.join('{item}-{clicked}'.format(**one) for one in items)}" for u, t, items in shown]
    (folder / "impressions.csv").write_text("user,time,shown\n" + "\n".join(texts) + "\n")
    return folder, rows


@pytest.fixture
def run(log, tmp_path, monkeypatch):
    """Run a recipe."""
    monkeypatch.chdir(log[0])

    def found(title, number=0, threads=2):
        opened = QueryRows(SECTIONS[title][number], Engine(threads, 256 << 20, tmp_path / "spill"), threads)
        assert not opened.doubts
        return rows_of(opened).to_pylist()

    return found


@pytest.mark.parametrize(("title", "number"), ALL, ids=[f"{title} {number}" for title, number in ALL])
def test_a_recipe_has_one_result(run, title, number):
    assert run(title, number, 1) == run(title, number, 4) != []


def test_histories(run, log):
    by_user = defaultdict(list)
    for row in log[1]:
        by_user[row["user"]].append((row["time"], row["item"]))
    found = run("A user's history before each event")
    assert len(found) == len(log[1])
    for row in found:
        before = sorted(one for one in by_user[row["user"]] if one[0] < row["time"])
        assert row["history"] == [item for _, item in before[-20:]]


def test_impressions(run):
    first, second = (run("Impressions in a list, one row each", n) for n in (0, 1))
    assert len(first) == 18
    assert [{**row, "label": str(row["label"])} for row in first] == second
    assert first[1] == {"user": "u1", "time": 1, "item": "N1", "label": 0}


def test_negatives(run, log):
    had = {(row["user"], row["item"]) for row in log[1]}
    often = {item for item, _ in Counter(row["item"] for row in log[1]).most_common(10)}
    shares = []
    for number in (0, 1):
        found = run("Negatives for a log of positives", number)
        drawn = [row for row in found if row["label"] == 0]
        assert sum(row["label"] for row in found) == len(log[1])
        assert not had & {(row["user"], row["item"]) for row in drawn}
        assert 1000 < len(drawn) < 4 * len(log[1])
        shares.append(sum(row["item"] in often for row in drawn) / len(drawn))
    assert shares[1] > 2 * shares[0]  # by popularity


def test_numbers(run, log):
    buckets = Counter(row["price_bucket"] for row in run("Buckets of equal size"))
    assert sorted(buckets) == list(range(10))
    assert max(buckets.values()) < 1.3 * min(buckets.values())
    for row in run("How often an item was chosen before")[:200]:
        before = [one for one in log[1] if one["item"] == row["item"] and one["time"] < row["time"]]
        assert (row["shown"], row["chosen"]) == (len(before), sum(one["label"] for one in before))
    for row in run("Hour and weekday")[:50]:
        assert 0 <= row["hour"] < 24
        assert 0 <= row["weekday"] < 7
    assert {(row["label"]) for row in run("Fewer rows of frequent labels")} == {0, 1}


def test_splits(run, log):
    by_user = defaultdict(set)
    for row in run("Split by user"):
        by_user[row["user"]].add(row["part"])
    assert all(len(parts) == 1 for parts in by_user.values())
    last = [row for row in run("Leave the last event of each user out") if row["part"] == "test"]
    assert Counter(row["user"] for row in last) == Counter({row["user"] for row in log[1]})
    newest = {user: max(row["time"] for row in log[1] if row["user"] == user) for user in by_user}
    assert all(row["time"] == newest[row["user"]] for row in last)


def draw_log(rng, n=400):
    """Return rows with missing users, items, times, labels and prices, and many equal times."""

    def some(value):
        return None if rng.random() < 0.1 else value

    return [
        {
            "user": some(f"u{rng.integers(6)}"), "item": some(int(rng.integers(15))),
            "time": some(int(rng.integers(12)) * 3600), "label": some(int(rng.integers(2))),
            "price": some(round(float(rng.random()), 2)),
        }
        for _ in range(n)
    ]  # fmt: skip


def find_history(rows, row, n, *, is_missing=lambda time: time is None):
    """Return the last `n` items of the row's user before its time; missing items are last of those of one time."""
    if is_missing(row["time"]):
        return []
    events = [one for one in rows if one["user"] == row["user"] and not is_missing(one["time"])]
    before = [one for one in events if one["time"] < row["time"]]
    ordered = sorted(before, key=lambda one: (one["time"], one["item"] is None, one["item"] or 0))
    return [one["item"] for one in ordered][-n:] if n else []


def as_texts(rows):
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in rows)


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def run_missing(request, tmp_path, monkeypatch):
    """Run a recipe on a log with missing values; return its rows and the log's."""
    rows = draw_log(np.random.default_rng(request.param))
    names = list(rows[0])
    lines = [",".join("" if row[name] is None else str(row[name]) for name in names) for row in rows]
    (tmp_path / "log.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    monkeypatch.chdir(tmp_path)

    def found(title, number=0):
        opened = QueryRows(SECTIONS[title][number], Engine(2, 256 << 20, tmp_path / "spill"), 2)
        return rows_of(opened).to_pylist(), rows

    return found


def test_histories_with_missing_values(run_missing):
    found, rows = run_missing("A user's history before each event")
    expected = [
        {name: row[name] for name in ("user", "item", "time", "label")} | {"history": find_history(rows, row, 20)}
        for row in rows
    ]
    assert as_texts(found) == as_texts(expected)


@pytest.mark.parametrize(
    ("title", "number"),
    [("Negatives for a log of positives", 0), ("Negatives for a log of positives", 1), ("Negatives with histories", 0)],
)
def test_negatives_with_missing_values(run_missing, title, number):
    found, rows = run_missing(title, number)
    had = {(row["user"], row["item"]) for row in rows}
    names = [name for name in found[0] if name != "label"]
    events = [{**row, "history": find_history(rows, row, 20)} for row in rows]
    events = [{name: row[name] for name in names} for row in events]
    positives = [row for row in found if row["label"] == 1]
    assert as_texts(positives) == as_texts([{**event, "label": 1} for event in events])
    negatives = [row for row in found if row["label"] == 0]
    assert len(negatives) > 20
    assert not had & {(row["user"], row["item"]) for row in negatives}
    assert None not in {row["item"] for row in negatives}
    of_events = set(as_texts({name: value for name, value in event.items() if name != "item"} for event in events))
    of_negatives = as_texts({k: v for k, v in row.items() if k not in ("item", "label")} for row in negatives)
    assert set(of_negatives) <= of_events


def test_counts_and_buckets_with_missing_values(run_missing):
    found, rows = run_missing("How often an item was chosen before")
    expected = []
    for row in rows:
        before = [
            one
            for one in rows
            if one["item"] == row["item"] and None not in (one["time"], row["time"]) and one["time"] < row["time"]
        ]
        chosen = sum(one["label"] or 0 for one in before)
        expected.append({k: v for k, v in row.items() if k != "price"} | {"shown": len(before), "chosen": chosen})
    assert as_texts({**row, "chosen": int(row["chosen"])} for row in found) == as_texts(expected)
    found, rows = run_missing("Buckets of equal size")
    assert sum(row["price_bucket"] is None for row in found) == sum(row["price"] is None for row in rows)
    found, rows = run_missing("Two columns as one")
    pairs = {(row["item"], None if row["time"] is None else row["time"] // 3600) for row in rows}
    assert len({row["item_hour"] for row in found}) == len(pairs)


@pytest.mark.parametrize("n", [0, 1, 3, 1001])
@pytest.mark.parametrize("kind", ["infinite", "text", "timestamps"])
def test_last_items_equals_a_simple_program(tmp_path, kind, n):
    rows = draw_log(np.random.default_rng(n))
    special = {0: float("inf"), 3600: float("-inf"), 7200: float("nan")}
    if kind == "infinite":
        rows = [{**row, "time": None if row["time"] is None else special.get(row["time"], row["time"])} for row in rows]
    elif kind == "text":
        rows = [{**row, "time": None if row["time"] is None else f"{row['time']:06}"} for row in rows]
    else:
        rows = [{**row, "time": None if row["time"] is None else datetime.fromtimestamp(row["time"])} for row in rows]
    table = pa.Table.from_pylist([{**row, "place": i} for i, row in enumerate(rows)])
    engine = Engine(2, 256 << 20, tmp_path, {"log": table})
    found = engine.rows(f"SELECT place, last_items(item, user, time, {n}) FROM log ORDER BY place")
    expected = [find_history(rows, row, n, is_missing=lambda time: time is None or time != time) for row in rows]
    assert [items for _, items in found] == expected


def test_many_equal_times(tmp_path):
    """A list for each of them would take minutes, and gigabytes."""
    sql = "SELECT i, last_items(i, i % 2, i // 20000, 5) AS history FROM range(60000) AS r(i)"
    found = dict(Engine(2, 512 << 20, tmp_path).rows(f"FROM ({sql}) WHERE i IN (39999, 40000, 40001)"))
    assert found == {
        39999: [19991, 19993, 19995, 19997, 19999],
        40000: [39990, 39992, 39994, 39996, 39998],
        40001: [39991, 39993, 39995, 39997, 39999],
    }


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "users", "times"), [(80_000, 2, 2), (300_000, 2, 3), (300_000, 5, 50)])
def test_very_many_equal_times(tmp_path, rows, users, times):
    """The cases that took 15 seconds, and more than 4 minutes; each row's history, beside a program of a few lines."""
    sql = f"SELECT i, last_items(i, i % {users}, i * {times} // {rows}, 5) AS h FROM range({rows}) AS r(i)"
    found = Engine(2, 1 << 30, tmp_path).rows(f"SELECT i, h FROM ({sql}) WHERE i % 97 = 0 ORDER BY i")
    for i, history in found:
        moment = i * times // rows
        first = -(-moment * rows // times)  # the first row of this time
        before = [j for j in range(max(0, first - 5 * users), first) if j % users == i % users]
        assert history == before[-5:], i


def test_the_number_of_last_items_is_a_constant(tmp_path):
    sql = "SELECT last_items(i, u, t, i) FROM (SELECT 1 AS i, 2 AS u, 3 AS t)"
    with pytest.raises(UserError, match="last_items"):
        QueryRows(sql, Engine(1, 256 << 20, tmp_path), 1)
