"""The recipes of docs/guides/query.md: each runs, and gives what it promises."""

import json
import re
from collections import Counter, defaultdict

import numpy as np
import pytest

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
