"""Weighted bags are served in each form: weights in the text, or in a column of their own, as lists or as text."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.data.preprocess import cli as preprocess
from tests.data.test_bag_weights import draw_bags, joined, table_of, write_features
from tests.serving.conftest import run, trained
from tests.serving.helpers import Served, as_rows, bits, tensor

FORMS = {
    "in the text": 'separator = "|"\nweights = ":"\n',
    "a column of text": 'separator = "|"\nweights_column = "w"\n',
    "a column of lists": 'weights_column = "w"\n',
}


def columns_of(form, bags):
    if form == "in the text":
        return {"tags": joined(bags, "|")}
    values, weights = [values for values, _ in bags], [weights for _, weights in bags]
    if form == "a column of lists":
        return {"tags": values, "w": weights}
    return {"tags": ["|".join(each) for each in values], "w": ["|".join(map(str, each)) for each in weights]}


@pytest.mark.parametrize("form", FORMS)
def test_weighted_bags(tmp_path, form):
    bags = draw_bags()
    columns = columns_of(form, bags)
    lists = {"tags": pa.list_(pa.string()), "w": pa.list_(pa.float64())} if form == "a column of lists" else {}
    table = table_of(bags, **{name: pa.array(values, lists.get(name)) for name, values in columns.items()})
    pq.write_table(table, tmp_path / "t.parquet")
    write_features(tmp_path, FORMS[form])
    flags = ["--features", tmp_path / "f.toml", "--threshold", 0, "--test-fraction", 0.2]
    run(preprocess, "table", tmp_path / "t.parquet", *flags, "--out", tmp_path / "data")
    rows = {"u": [f"u{i % 9}" for i in range(40)], **{name: values[:40] for name, values in columns.items()}}
    with Served(trained(tmp_path / "data", tmp_path / "run", "--model", "deepfm"), listens=False) as served:
        expected = served.predictor(rows)
        assert len(np.unique(expected)) > 20, "weights make a difference"
        assert bits(served.predict({"columns": rows}).json["predictions"]) == bits(expected)
        assert bits(served.predict({"rows": as_rows(rows)}).json["predictions"]) == bits(expected)
        asked = [tensor(name, "BYTES", values) for name, values in rows.items()]
        if form == "a column of lists":  # of one length; rows of others go as JSON, or as rows with names
            some = {"u": rows["u"][:2], "tags": [["w1", "w2"], ["w3", "w9"]], "w": [[0.5, 2.0], [0.25, 1.0]]}
            expected = served.predictor(some)
            asked = [tensor("u", "BYTES", some["u"]), tensor("tags", "BYTES", some["tags"], [2, 2])]
            asked.append(tensor("w", "FP64", some["w"], [2, 2]))
        answer = served.infer({"inputs": asked})
        assert bits(answer.json["outputs"][0]["data"]) == bits(expected)
        wrong = {**rows, "tags" if form == "in the text" else "w": ["w1:-1" if form == "in the text" else "x"] * 40}
        assert "row 1, column " in served.predict({"columns": wrong}).error
        assert served.predict({"rows": []}).json["predictions"] == []
        nothing = {"u": "u1", **dict.fromkeys(columns)}
        empty = {"u": ["u1"], **{name: [[] if form == "a column of lists" else ""] for name in columns}}
        expected = bits(served.predictor(empty))
        assert bits(served.predict({"rows": [nothing]}).json["predictions"]) == expected
        if "w" in columns:
            one = {"u": "u1", "tags": ["w1"] if form == "a column of lists" else "w1", "w": None}
            assert "row 1, column 'tags': 1 value, but 0 weights" in served.predict({"rows": [one]}).error
