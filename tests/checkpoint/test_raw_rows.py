"""Raw rows: the columns that a data set's query computes are computed for predictions as they were for training."""

import json
import random
import shutil
from datetime import date

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import hostdev
from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.predict import cli as predict
from hostdev.ext.serving import cli as serve
from hostdev.ext.training import cli as train
from tests.serving.helpers import Served

SQL = """
WITH log AS (SELECT *, lower(city) AS town FROM 'log.csv' WHERE user <> 'u3')
SELECT user, code, concat(town, '/', hour(to_timestamp(time))) AS place, dayname(day) AS day_name,
    CASE WHEN price > 20 THEN 'dear' WHEN price IS NULL THEN NULL ELSE 'cheap' END AS kind,
    time // 86400 % 7 AS weekday, log10(price + 1) AS cost, string_split(tags, '|') AS tags,
    amount::BIGINT * 3 AS tripled, stars >= 3 AS liked
FROM log
ORDER BY time
"""
FLAGS = ["--label", "liked", "--categorical", "user,code,place,day_name,kind,weekday,tripled", "--numeric", "cost"]
COMPUTED = ["place", "day_name", "kind", "weekday", "cost", "tags", "tripled"]
RAW = ["user", "code", "city", "time", "day", "price", "tags", "amount"]


def run(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


def make_rows(n=600, seed=0):
    """Return rows of texts as a CSV file has them; "" is a missing value."""
    rng = random.Random(seed)

    def some(value, share=0.08):
        return "" if rng.random() < share else str(value)

    return [
        {
            "user": some(f"u{rng.randrange(9)}"), "code": some(f"{rng.randrange(30):03}"),
            "city": some(rng.choice(["Bern", "ULM", "Åre", '"Q", x'])),
            "time": some(1_700_000_000 + rng.randrange(9**8)),
            "day": some(f"{rng.randrange(1, 29):02}/{rng.randrange(1, 13):02}/2026"),
            "price": some(rng.choice([0.1, 3, 25.75, 1e3])), "tags": some("|".join(rng.sample("abcd", 2))),
            "amount": some(rng.randrange(10**15, 10**15 + 20)), "stars": rng.randrange(1, 6),
        }
        for _ in range(n)
    ]  # fmt: skip


def write_csv(path, rows, delimiter=","):
    names = list(rows[0])
    quoted = (
        '"' + str(row[name]).replace('"', '""') + '"' if row[name] != "" else "" for row in rows for name in names
    )
    cells = list(quoted)
    lines = [delimiter.join(cells[i : i + len(names)]) for i in range(0, len(cells), len(names))]
    path.write_text("\n".join([delimiter.join(names), *lines]) + "\n")


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A log, the data set that a query made of it, a run, and the query's rows without its WHERE as a Parquet file."""
    path = tmp_path_factory.mktemp("shop")
    write_csv(path / "log.csv", make_rows())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        (path / "shop.sql").write_text(SQL)
        bag = ["--bag", "tags", "--out", "data"]
        assert run(preprocess, "query", "--query", "shop.sql", *FLAGS, *bag) == 0
        options = ["--data", "data", "--batch-size", 100, "--emb-dim", 4, "--epochs", 1, "--device", "cpu"]
        assert run(train, *options, "--checkpoint-every", 3, "--run-dir", "run") == 0
        (path / "all.parquet").write_bytes(b"")
        import duckdb

        prepared = SQL.replace(" WHERE user <> 'u3'", "").replace("ORDER BY time", "")
        duckdb.sql("SET TimeZone = 'UTC'")
        duckdb.sql(f"COPY ({prepared}) TO 'all.parquet'")
    return path


@pytest.fixture(scope="module")
def expected(shop):
    """The predictions of the prepared rows."""
    with pytest.warns(UserWarning, match="tags"):  # as raw and computed rows have a column of this name
        return hostdev.Predictor(shop / "run")(pq.read_table(shop / "all.parquet"))


@pytest.fixture(scope="module")
def typed(shop):
    """The log as a table with the types of training."""
    rows = [{k: None if v == "" else v for k, v in row.items()} for row in make_rows()]
    for row in rows:
        row["time"] = row["time"] and int(row["time"])
        row["price"] = row["price"] and float(row["price"])
        row["amount"] = row["amount"] and int(row["amount"])
        row["day"] = row["day"] and date(*map(int, row["day"].split("/")[::-1]))
    return pa.Table.from_pylist(rows)


def predict_file(path, tmp_path, *more):
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
    assert run(predict, "--checkpoint", path / "run", "--out", out, *more) == 0
    return pq.read_table(out)


def test_a_raw_file_equals_the_prepared_one(shop, expected, tmp_path, capsys):
    found = predict_file(shop, tmp_path, "--data", shop / "log.csv", "--keep", "place,city")
    assert "AUC" in capsys.readouterr().out  # the label is computed, too
    prepared = predict_file(shop, tmp_path, "--data", shop / "all.parquet", "--keep", "place")
    assert found["probability"].to_pylist() == prepared["probability"].to_pylist() == expected.tolist()
    assert found["place"].to_pylist() == prepared["place"].to_pylist()
    assert found["city"].to_pylist() == [row["city"] or None for row in make_rows()]


def test_a_few_rows_have_the_types_of_training(shop, expected, typed, tmp_path):
    """One row has codes that look like numbers, days whose format is ambiguous, and columns without a value."""
    for number, row in enumerate(make_rows()[:12]):
        del row["stars"]
        write_csv(tmp_path / "one.csv", [dict(reversed(row.items()))], ";")
        (tmp_path / "one.json").write_text(json.dumps({k: v or None for k, v in row.items()}))
        pq.write_table(typed.slice(number, 1), tmp_path / "one.parquet")
        for name in ("one.csv", "one.json", "one.parquet"):
            found = predict_file(shop, tmp_path, "--data", tmp_path / name)
            assert found["probability"].to_pylist() == expected[number : number + 1].tolist(), (name, row)


def test_rows_in_python_equal_the_prepared_ones(shop, expected, typed):
    predictor = hostdev.Predictor(shop / "run")
    assert np.array_equal(predictor(typed), expected)
    assert np.array_equal(predictor(typed.drop(["stars"]).to_batches()[0]), expected)
    assert np.array_equal(predictor(typed.to_pandas(types_mapper=pd.ArrowDtype)), expected)
    assert np.array_equal(predictor(typed.to_pandas()), expected)  # numbers with missing values are floats
    assert np.array_equal(predictor({name: typed[name].to_pylist() for name in RAW}), expected)
    texts = {name: [row[name] for row in make_rows()] for name in RAW}
    assert np.array_equal(predictor(texts), expected)
    for number, row in enumerate(typed.select(RAW).to_pylist()[:9]):
        assert predictor(row).tolist() == expected[number : number + 1].tolist()
        assert predictor(pd.Series(row)).tolist() == expected[number : number + 1].tolist()


def test_given_columns_are_used_where_they_cannot_be_computed(shop, expected, typed):
    predictor = hostdev.Predictor(shop / "run")
    computed = pq.read_table(shop / "all.parquet")
    rows = typed.select(["user", "code", "time", "city", "day", "price", "amount"]).append_column(
        "tags", computed["tags"]
    )  # of which `tags` is text in raw rows
    with pytest.raises(UserError, match="tags"):
        predictor(rows)
    rows = typed.drop(["day"]).append_column("day_name", computed["day_name"])
    assert np.array_equal(predictor(rows), expected)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("time", 1.5, ["row 2", "time", "BIGINT"]),
        ("time", "1.5", ["row 2", "time", "BIGINT"]),
        ("time", "soon", ["row 2", "time", "soon"]),
        ("time", 2**70, ["time"]),
        ("amount", 1e300, ["row 2", "amount"]),
        ("day", "2026-01-31", ["row 2", "day", "%d/%m/%Y"]),
        ("price", "much", ["row 2", "price", "much"]),
        ("city", 1.5, ["row 2", "city", "text"]),
    ],
)
def test_a_value_that_is_not_of_the_type_of_training(shop, typed, name, value, words):
    rows = {each: typed[each].to_pylist()[:3] for each in RAW}
    rows[name] = [None, value, None]
    with pytest.raises(UserError) as error:
        hostdev.Predictor(shop / "run")(rows)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_equal_values_of_other_types(shop, expected, typed):
    rows = {each: typed[each].to_pylist()[:50] for each in RAW}
    rows["time"] = [None if value is None else float(value) for value in rows["time"]]
    rows["amount"] = [None if value is None else str(value) for value in rows["amount"]]
    rows["price"] = pa.array(rows["price"], pa.float64()).cast(pa.decimal128(9, 2))
    rows["day"] = pa.array(rows["day"]).cast(pa.timestamp("ms"))
    assert np.array_equal(hostdev.Predictor(shop / "run")(rows), expected[:50])


def test_missing_raw_columns_are_named(shop, tmp_path, capsys, typed):
    predictor = hostdev.Predictor(shop / "run")
    with pytest.raises(UserError, match="place.*city"):
        predictor(typed.drop(["city"]))
    rows = make_rows(3)
    for row in rows:
        del row["day"]
    write_csv(tmp_path / "some.csv", rows)
    out = tmp_path / "p.csv"
    assert run(predict, "--checkpoint", shop / "run", "--data", tmp_path / "some.csv", "--out", out) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("some.csv", "day_name", "day")), told
    assert not out.exists()


def test_a_wrong_line_of_a_file_is_named(shop, tmp_path, capsys):
    rows = make_rows(5)
    rows[3]["time"] = "7.5"
    write_csv(tmp_path / "some.csv", rows)
    out = tmp_path / "p.csv"
    assert run(predict, "--checkpoint", shop / "run", "--data", tmp_path / "some.csv", "--out", out) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("some.csv", "row 4", "time", "7.5")), told


def test_served_rows_equal_the_prepared_ones(shop, expected, typed):
    rows = typed.select(RAW).to_pylist()[:40]
    for row, text in zip(rows, make_rows(), strict=False):
        row["day"] = text["day"] or None
    with Served(shop / "run", listens=False) as served:
        for number, row in enumerate(rows[:5]):
            assert served.predict({"rows": [row]}).json["predictions"] == expected[number : number + 1].tolist()
        assert served.predict({"rows": rows}).json["predictions"] == expected[:40].tolist()
        columns = {name: [row[name] for row in rows] for name in RAW}
        assert served.predict({"columns": columns}).json["predictions"] == expected[:40].tolist()
        prepared = pq.read_table(shop / "all.parquet").slice(0, 40).drop(["liked"]).to_pylist()
        assert served.predict({"rows": prepared}).json["predictions"] == expected[:40].tolist()
        tensors = [
            {"name": "user", "shape": [1], "datatype": "BYTES", "data": [rows[0]["user"]]},
            {"name": "code", "shape": [1], "datatype": "BYTES", "data": [rows[0]["code"]]},
            {"name": "city", "shape": [1], "datatype": "BYTES", "data": [rows[0]["city"]]},
            {"name": "time", "shape": [1], "datatype": "INT64", "data": [rows[0]["time"]]},
            {"name": "day", "shape": [1], "datatype": "BYTES", "data": [rows[0]["day"]]},
            {"name": "price", "shape": [1], "datatype": "FP64", "data": [rows[0]["price"]]},
            {"name": "tags", "shape": [1], "datatype": "BYTES", "data": [rows[0]["tags"]]},
            {"name": "amount", "shape": [1], "datatype": "INT64", "data": [rows[0]["amount"]]},
        ]
        assert served.infer({"inputs": tensors}).json["outputs"][0]["data"] == expected[:1].tolist()
        assert "time" in served.predict({"rows": [{**rows[0], "time": 1.5}]}).error
        assert "place" in served.predict({"rows": [{"user": "u1"}]}).error
        assert served.predict({"rows": []}).json["predictions"] == []
        model = served.serving.gatherer.model
        requests = [{name: [row[name]] for name in RAW} for row in rows]
        requests[7]["time"] = ["soon"]
        batch, sizes = model.encode(requests)
        assert isinstance(sizes[7], UserError)
        right = [number for number in range(40) if number != 7]
        for number, part in zip(right, batch.split(range(40)), strict=True):
            assert served.predictor.predict(part).tolist() == expected[number : number + 1].tolist()


def train_query(path, sql, *flags):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        assert run(preprocess, "query", sql, "--label", "liked", *flags, "--out", "data") == 0
        options = ["--data", "data", "--batch-size", 100, "--emb-dim", 4, "--epochs", 1, "--device", "cpu"]
        assert run(train, *options, "--checkpoint-every", 3, "--run-dir", "run") == 0
    return path


@pytest.fixture(scope="module")
def joined(shop, tmp_path_factory):
    """A data set whose query is not row by row: it has a history and joins a table."""
    path = tmp_path_factory.mktemp("joined")
    shutil.copy(shop / "log.csv", path)
    items = [{"code": f"{n:03}", "genre": f"g{n % 4}"} for n in range(0, 30, 2)]
    write_csv(path / "items.csv", items)
    sql = (
        "SELECT l.*, i.genre, hour(to_timestamp(l.time)) AS hour, stars >= 3 AS liked, "
        "last_items(l.code, l.user, l.time, 5) AS history FROM 'log.csv' l LEFT JOIN 'items.csv' i USING (code)"
    )
    return train_query(
        path, sql, "--categorical", "user,code,genre,hour", "--bag", "history", "--share", "history=code"
    )


def test_what_is_not_row_by_row_is_refused(joined, typed, capsys, tmp_path):
    with pytest.raises(UserError, match="genre.*hour.*joins") as error:
        hostdev.Predictor(joined / "run")(typed)
    assert "--query" in str(error.value)
    arguments = ["--checkpoint", joined / "run", "--data", joined / "log.csv", "--out", tmp_path / "p.csv"]
    assert run(predict, *arguments) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("genre", "hour", "history", "joins", "--query")), told


def test_another_statement(joined, typed, tmp_path, monkeypatch):
    """It joins a table, which is read once; histories are given."""
    monkeypatch.chdir(joined)
    sql = "SELECT r.*, i.genre, hour(to_timestamp(time)) AS hour FROM rows r LEFT JOIN 'items.csv' i USING (code)"
    given = typed.append_column("history", pa.array([["001", "004"]] * len(typed)))
    genres = {f"{n:03}": f"g{n % 4}" for n in range(0, 30, 2)}
    rows = {name: given[name].to_pylist() for name in ("user", "code", "history")}
    rows["genre"] = [genres.get(code) for code in rows["code"]]
    rows["hour"] = [None if time is None else time // 3600 % 24 for time in given["time"].to_pylist()]
    plain = hostdev.Predictor(joined / "run")
    expected = plain(rows)
    predictor = hostdev.Predictor(joined / "run", query=sql)
    assert np.array_equal(predictor(given), expected)
    (joined / "q.sql").write_text(sql)
    pq.write_table(given, tmp_path / "given.parquet")
    found = predict_file(joined, tmp_path, "--data", tmp_path / "given.parquet", "--query", "q.sql")
    assert found["probability"].to_pylist() == expected.tolist()
    served_with = []
    monkeypatch.setattr("hostdev.ext.serving.command.run", served_with.append)
    assert run(serve, "--checkpoint", joined / "run", "--query", "q.sql") == 0
    assert served_with[0].query == sql
    with Served(joined / "run", listens=False, query=sql) as served:
        sent = [{**row, "day": None} for row in given.drop(["stars", "city"]).to_pylist()[:20]]
        assert served.predict({"rows": sent}).json["predictions"] == expected[:20].tolist()
        assert served.predict({"rows": []}).json["predictions"] == []


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT r.*, 1 AS hour, 'g' AS genre FROM rows r JOIN 'items.csv' i USING (code)", ["row", "LEFT JOIN"]),
        ("SELECT r.*, 1 AS hour, 'g' AS genre FROM rows r, range(2)", ["row 1", "2 rows"]),
        ("SELECT count(*) AS hour FROM rows", ["--query", "aggregate"]),
        ("SELECT *, count(*) OVER () AS hour FROM rows", ["hour", "window"]),
        ("SELECT DISTINCT * FROM rows", ["--query", "DISTINCT"]),
        ("SELECT *, random() AS hour FROM rows", ["random"]),
        ("SELECT *, 1 AS hour FROM rows", ["genre"]),
        ("SELECT r.*, 1 AS hour, genre FROM rows r JOIN 'nowhere.csv' USING (code)", ["nowhere"]),
        ("SELEC 1", ["query"]),
        ("SELECT 1; SELECT 2", ["2 statements"]),
    ],
)
def test_wrong_statements(joined, typed, monkeypatch, sql, words):
    monkeypatch.chdir(joined)
    rows = typed.append_column("history", pa.array([["001", "004"]] * len(typed)))
    with pytest.raises(UserError) as error:
        hostdev.Predictor(joined / "run", query=sql)(rows)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def redefined(shop, tmp_path_factory):
    """A data set whose query computes a column under the name of a raw one."""
    path = tmp_path_factory.mktemp("redefined")
    shutil.copy(shop / "log.csv", path)
    sql = "SELECT * REPLACE (price * 2 AS price), hour(to_timestamp(time)) AS hour, stars > 2 AS liked FROM 'log.csv'"
    return train_query(path, sql, "--categorical", "user,code,hour", "--numeric", "price")


def test_a_column_that_has_the_name_of_a_raw_one(redefined, typed):
    predictor = hostdev.Predictor(redefined / "run")
    raw = predictor(typed)
    computed = {name: typed[name].to_pylist() for name in ("user", "code", "price")}
    computed["price"] = [None if price is None else price * 2 for price in computed["price"]]
    computed["hour"] = [None if time is None else time // 3600 % 24 for time in typed["time"].to_pylist()]
    with pytest.warns(UserWarning, match="price"):
        assert np.array_equal(predictor(computed), raw)
    sql = "SELECT * REPLACE (price * 2 AS price), hour(to_timestamp(time)) AS hour FROM rows"
    given = hostdev.Predictor(redefined / "run", query=sql)
    rows = {**computed, "price": typed["price"].to_pylist(), "time": typed["time"].to_pylist()}
    assert np.array_equal(given(rows), raw)
