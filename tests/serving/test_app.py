"""The application without sockets: answers equal `Predictor` to the bit, and wrong requests are refused in words."""

import json
import re
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostdev.ext.serving.columns import RawColumn, from_tensors
from hostdev.ext.serving.tensors import Tensor
from tests.serving.helpers import FILMS, Served, as_rows, bits, film_tensors, repeated, tensor

BINARY = "Inference-Header-Content-Length"
ROW = as_rows(FILMS)[0]


def packed(texts):
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


@pytest.mark.parametrize("n", [1, 4, 64, 65, 300])  # few and many rows are encoded in two ways; the batch size is 128
def test_equal_to_the_predictor(film_server, n):
    rows = repeated(FILMS, n)
    expected = bits(film_server.predictor(rows))
    answer = film_server.predict({"rows": as_rows(rows)})
    assert answer.status == 200, answer.body
    assert bits(answer.json["predictions"]) == expected
    assert (answer.json["model"], answer.json["step"]) == ("deepfm", film_server.predictor.step)
    assert bits(film_server.predict({"columns": rows}).json["predictions"]) == expected
    answer = film_server.infer({"id": "x", "inputs": film_tensors(rows)}).json
    assert (answer["model_name"], answer["model_version"], answer["id"]) == (
        "deepfm",
        str(film_server.predictor.step),
        "x",
    )
    [output] = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("liked", "FP32", [n])
    assert bits(output["data"]) == expected


def test_binary_tensors(film_server):
    parts = {name: packed(values) for name, values in FILMS.items() if name != "age"}
    parts["age"] = np.array(FILMS["age"], np.float64).tobytes()
    inputs = [
        {
            "name": name,
            "datatype": "FP64" if name == "age" else "BYTES",
            "shape": [4, 1],
            "parameters": {"binary_data_size": len(part)},
        }
        for name, part in parts.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(parts.values())
    headers = {BINARY: str(len(head)), "Content-Type": "application/octet-stream"}
    answer = film_server.infer(body, headers)
    assert answer.status == 200, answer.body
    size = int(answer.headers[BINARY.lower()])
    [output] = json.loads(answer.body[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": 16}
    found = np.frombuffer(answer.body[size:], "<f4")
    assert bits(found) == bits(film_server.predictor(FILMS))
    for wrong, message in (
        (body[:-1], "input 'age' has 32 bytes, but the body has 31 left for it"),
        (body + b"x", "the body has 1 bytes after its last tensor"),
        (body.replace(b"\2\0\0\0u2", b"\3\0\0\0u2"), "row 3, column 'user': the text ends outside"),
        (body.replace(b"\2\0\0\0u2", b"\2\0\0\0\xffu"), "row 2, column 'user': the text is not UTF-8"),
    ):
        assert message in film_server.infer(wrong, headers).error
    for length in ("-1", "x", str(len(body) + 1), "9" * 30):
        assert BINARY in film_server.infer(body, {**headers, BINARY: length}).error


def test_criteo_columns(criteo_server):
    names = criteo_server.predictor.encoding.columns()
    assert len(names) == 39
    rows = {name: ["68fd1e64", "", "zz"] if name.startswith("C") else [3, None, 0] for name in names}
    expected = bits(criteo_server.predictor(rows))
    assert bits(criteo_server.predict({"columns": rows}).json["predictions"]) == expected
    inputs = [tensor(name, "BYTES" if name.startswith("C") else "INT32", values) for name, values in rows.items()]
    assert bits(criteo_server.infer({"inputs": inputs}).json["outputs"][0]["data"]) == expected


def test_typed_columns(typed_server, typed):
    """Integers as ids, lists in three forms, a vector, and two labels."""
    rows = typed.select(["shop", "price", "is_new", "tags", "emb"]).slice(0, 30)
    expected = typed_server.predictor(rows)
    columns = rows.to_pydict()
    found = typed_server.predict({"columns": columns}).json["predictions"]
    assert [bits([row["click"] for row in found]), bits([row["buy"] for row in found])] == [*map(bits, expected.T)]

    metadata = typed_server.ask("GET", "/v2/models/mmoe").json
    shapes = {one["name"]: (one["datatype"], one["shape"]) for one in metadata["inputs"]}
    assert shapes == {
        "price": ("FP64", [-1]),
        "emb": ("FP64", [-1, 3]),
        "shop": ("INT64", [-1]),
        "is_new": ("BYTES", [-1]),
        "tags": ("BYTES", [-1]),
    }
    assert [one["name"] for one in metadata["outputs"]] == ["click", "buy"]
    width = max(map(len, columns["tags"]))
    padded = [tags + [""] * (width - len(tags)) for tags in columns["tags"]]
    for tags in (
        tensor("tags", "BYTES", list(map(json.dumps, columns["tags"]))),
        tensor("tags", "BYTES", padded, [30, width]),
        tensor("tags", "BYTES", [tag for row in padded for tag in row], [30, width]),
    ):
        inputs = [
            tensor("shop", "INT64", columns["shop"]),
            tensor("price", "FP32", columns["price"]),
            tensor("is_new", "BOOL", columns["is_new"]),
            tags,
            tensor("emb", "FP32", columns["emb"], [30, 3]),
        ]
        answer = typed_server.infer({"inputs": inputs, "outputs": [{"name": "buy"}]}).json
        assert bits(answer["outputs"][0]["data"]) == bits(expected[:, 1])
    wrong = [*inputs[:3], tensor("tags", "BYTES", ['["a"', *["[]"] * 29]), inputs[4]]
    assert "row 1, column 'tags' is not JSON" in typed_server.infer({"inputs": wrong}).error
    wrong = [*inputs[:4], tensor("emb", "FP32", [0.5] * 60, [30, 2])]
    assert "column 'emb': the vector has 2 numbers, not 3" in typed_server.infer({"inputs": wrong}).error
    assert (
        "[rows, values of a row]"
        in typed_server.infer({"inputs": [*inputs[:4], tensor("emb", "FP32", [1.0] * 30)]}).error
    )


def test_single_precision_reaches_the_encoder():
    """As an id, 0.1 in FP32 is the text 0.1 in any number of rows; a number may be a float of Python."""
    values = np.full(70, 0.1, np.float32)
    tensors = [Tensor("id", "FP32", (70,), values), Tensor("number", "FP32", (70,), values)]
    inputs = {name: RawColumn(name, name, "FP64", (-1,)) for name in ("id", "number")}
    found = from_tensors(tensors, inputs)
    assert found["id"] is values and found["number"] == values.tolist()


def test_metadata_and_versions(film_server):
    assert film_server.ask("GET", "/v2").json["extensions"] == ["binary_tensor_data"]
    assert film_server.ask("GET", "/v2/health/live").json == {"live": True}
    assert film_server.ask("GET", "/v2/health/ready").json == {"ready": True}
    version = str(film_server.predictor.step)
    metadata = film_server.ask("GET", "/v2/models/deepfm").json
    assert metadata["versions"] == [version]
    assert metadata == film_server.ask("GET", f"/v2/models/deepfm/versions/{version}").json
    assert film_server.ask("GET", f"/v2/models/deepfm/versions/{version}/ready").json == {
        "name": "deepfm",
        "ready": True,
    }
    assert film_server.infer({"inputs": film_tensors()}, version=f"/versions/{version}").status == 200
    answer = film_server.infer({"inputs": film_tensors()}, version="/versions/7")
    assert (answer.status, answer.error) == (404, f"there is no version '7' of the model; version {version} is served")
    named = {"inputs": film_tensors(), "model_name": "deepfm", "id": None, "parameters": None}
    assert film_server.infer(named).status == 200
    assert film_server.infer({**named, "model_name": "x"}).status == 404
    assert film_server.infer({**named, "model_version": "7"}).status == 404
    assert film_server.infer({**named, "model_version": 7}).status == 400
    assert film_server.ask("GET", "/v2/models/x").status == 404
    assert film_server.ask("GET", "/nowhere").status == 404
    assert film_server.ask("GET", "/v2/").status == 404
    answer = film_server.ask("DELETE", "/v1/predict")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert answer.error


def test_documents(film_server):
    document = film_server.ask("GET", "/openapi.json").json
    assert document["openapi"].startswith("3.")
    assert set(document["components"]["schemas"]["Row"]["properties"]) == set(FILMS)
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])
    page = film_server.ask("GET", "/")
    text = page.body.decode()
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/predict" in text and "history" in text
    [address] = re.findall(r"(http://[^/ ]+)/v1/predict -d", text)
    assert "PORT" not in address
    assert "src=" not in text and "http" not in text.replace(address, ""), "it needs the network"
    for path in document["paths"]:
        assert film_server.ask("GET", path).status != 404


def test_metrics(film_run):
    with Served(film_run, listens=False) as served:
        served.predict({"columns": FILMS})
        served.predict({"columns": {}})
        text = served.ask("GET", "/metrics").body.decode()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines['hostdev_requests_total{end="predict",status="200"}'] == "1.0"
        assert lines['hostdev_requests_total{end="predict",status="400"}'] == "1.0"
        assert lines['hostdev_request_seconds_count{end="predict"}'] == "2.0"
        assert float(lines["hostdev_model_step"]) == served.predictor.step
        assert 0 <= float(lines["hostdev_model_age_seconds"]) < 1e5
        assert lines["hostdev_rows_total"] == "4.0"
        assert lines["hostdev_batch_requests_sum"] == "1.0"
        assert lines["hostdev_queue_rows"] == "0.0"


WRONG_ROWS = [
    (b"", "the body is not JSON"),
    (b"\xff", "the body is not UTF-8, from byte 1"),
    (b'{"rows": NaN}', "NaN is not JSON; write null"),
    (b'{"rows": [], "rows": []}', "the name 'rows' occurs twice"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"rows": [' + b"9" * 5000 + b"]}", "thousands of digits"),
    ({"rows": [], "more": 1}, "the body must be"),
    ([], "the body must be"),
    ({"rows": {}}, "`rows` must be a list"),
    ({"rows": [ROW, 7]}, "row 2 is 7; it must be an object"),
    ({"rows": [ROW, {"user": "u1"}]}, "row 2 has no column 'age'; give null"),
    ({"columns": []}, "`columns` must be an object"),
    ({"columns": {"user": ["u1"]}}, "no column 'age'"),
    ({"columns": {**FILMS, "user": ["u1"]}}, "has 1 values"),
    ({"columns": {**FILMS, "user": "u1"}}, "column 'user' must be a list"),
    ({"rows": [ROW, {**ROW, "user": {}}]}, "row 2, column 'user': an object is not accepted"),
    ({"rows": [ROW, {**ROW, "user": ["a"]}]}, "row 2, column 'user': a list is not accepted"),
    ({"rows": [ROW, {**ROW, "user": 5}]}, "row 2, column 'user': 5 is a number, but values above it are text"),
    ({"rows": [ROW, {**ROW, "user": "\ud800"}]}, "row 2, column 'user': the text has half of a surrogate pair"),
    ({"rows": [ROW, {**ROW, "age": "old"}]}, "row 2, column 'age'"),
    ({"rows": [ROW, {**ROW, "age": 1e39}]}, "row 2, column 'age': 1e+39 is too large"),
    (
        json.dumps({"rows": [ROW, {**ROW, "age": 0}]}).replace('"age": 0', '"age": 1e400').encode(),
        "row 2, column 'age'",
    ),
    ({"rows": [{**ROW, "age": 10**30}]}, "row 1, column 'age'"),
    ({"rows": [{**ROW, "genres": [["a"]]}]}, "row 1, column 'genres': a list has a list"),
    ({"rows": [{**ROW, "genres": ["a", 1]}]}, "column 'genres'"),
    (
        {"rows": [ROW, {**ROW, "genres": ["Drama"]}]},
        "row 2, column 'genres': a list, but values above it are text; give text in each row, or a list in each row",
    ),
    ({"rows": [{**ROW, "genres": ["Drama"]}, ROW]}, "is text, but values above it are a list; give a list in each row"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_ROWS, ids=range(len(WRONG_ROWS)))
def test_wrong_rows(film_server, content, message, recwarn):
    answer = film_server.predict(content)
    assert answer.status == 400
    assert message in answer.error


AGE = next(one for one in film_tensors() if one["name"] == "age")
WRONG_TENSORS = [
    ({}, "needs `inputs`"),
    ({"inputs": film_tensors(), "priority": 1}, "unknown entry 'priority'"),
    ({"inputs": film_tensors(), "parameters": {"sequence_id": 1}}, "no parameter 'sequence_id'"),
    ({"inputs": film_tensors(), "id": 7}, "`id` must be text"),
    ({"inputs": [{}]}, "each of `inputs` must be an object"),
    ({"inputs": [AGE, AGE]}, "input 'age' is given twice"),
    ({"inputs": [{**AGE, "datatype": "FP8"}]}, "`datatype` must be one of"),
    ({"inputs": [{**AGE, "datatype": []}]}, "`datatype` must be one of"),
    ({"inputs": [{**AGE, "shape": [-1]}]}, "`shape` must be"),
    ({"inputs": [{**AGE, "shape": [True]}]}, "`shape` must be"),
    ({"inputs": [{**AGE, "shape": [4, 1, 1]}]}, "`shape` must be"),
    ({"inputs": [{**AGE, "shape": [4, 10**15]}]}, "more values than a body can hold"),
    ({"inputs": [{**AGE, "shape": [5]}]}, "input 'age' has 4 values, but the shape is [5]"),
    ({"inputs": [{**AGE, "shape": [4, 2], "data": [[1, 2]] * 3 + [[1]]}]}, "row 4, column 'age': 1 values"),
    ({"inputs": [{**AGE, "data": [1, 2, "x", 4]}]}, "row 3, column 'age': 'x' is not a value of type FP64"),
    ({"inputs": [{**AGE, "datatype": "FP32", "data": [1, 1e39, 2, 4]}]}, "row 2, column 'age': 1e+39"),
    ({"inputs": [{**AGE, "datatype": "INT8", "data": [1, 300, 2, 4]}]}, "row 2, column 'age': 300"),
    ({"inputs": [{**AGE, "datatype": "INT8", "data": [1, None, 2, 4.5]}]}, "row 4, column 'age': 4.5"),
    ({"inputs": [{**AGE, "datatype": "UINT64", "data": [1, None, 2, -4]}]}, "row 4, column 'age': -4"),
    ({"inputs": [{**AGE, "datatype": "FP64", "data": [1, 10**400, 2, 4]}]}, "row 2, column 'age': an integer of many"),
    ({"inputs": [{**AGE, "parameters": {"binary_data_size": 0}}]}, "both `data` and binary_data_size"),
    ({"inputs": [{**AGE, "parameters": {"shared_memory_region": "x"}}]}, "no parameter 'shared_memory_region'"),
    ({"inputs": [{**AGE, "shape": [4, 0], "data": []}]}, "no column 'user'"),
    ({"inputs": [*film_tensors()[1:], tensor("user", "BYTES", [], [4, 0])]}, "0 values per row"),
    ({"inputs": [*film_tensors()[1:]]}, "no column 'user'"),
    ({"inputs": [*film_tensors(), tensor("other", "BOOL", [True] * 4)]}, "the model has no input 'other'"),
    ({"inputs": film_tensors(), "parameters": {"timeout": -1}}, "timeout must be a whole number"),
    ({"inputs": film_tensors(), "parameters": {"priority": "high"}}, "priority must be a whole number"),
    ({"inputs": [{**AGE, "shape": [0, 1 << 62], "data": []}]}, "more values than a body can hold"),
    ({"inputs": [{**AGE, "shape": [1, 10**4299], "data": []}]}, "more values than a body can hold"),
    ({"inputs": [*film_tensors()[1:], tensor("user", "BYTES", ["u1"])]}, "input 'user' has 1 rows"),
    ({"inputs": [*film_tensors()[1:], tensor("user", "BYTES", ["u1"] * 8, [4, 2])]}, "2 values per row"),
    ({"inputs": film_tensors(), "outputs": [{"name": "x"}]}, "no output 'x'; its outputs are liked"),
    (
        {"inputs": film_tensors(), "outputs": [{"name": "liked", "parameters": {"classification": 2}}]},
        "'classification'",
    ),
    (
        {"inputs": film_tensors(), "outputs": [{"name": "liked", "parameters": {"binary_data": 2}}]},
        "must be true or false",
    ),
]


@pytest.mark.parametrize(("content", "message"), WRONG_TENSORS, ids=range(len(WRONG_TENSORS)))
def test_wrong_tensors(film_server, content, message):
    answer = film_server.infer(content)
    assert answer.status == 400
    assert message in answer.error


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*FILMS, "liked", ""])
rows = st.fixed_dictionaries(dict.fromkeys(FILMS, values)) | st.dictionaries(names, values)
tensors = st.fixed_dictionaries(
    {
        "name": names,
        "datatype": st.sampled_from(["BYTES", "FP32", "FP64", "INT8", "UINT64", "BOOL", "FP16", "FP7"]),
        "shape": st.lists(st.integers(-1, 4), max_size=3),
    },
    optional={"data": st.lists(values, max_size=4), "parameters": st.dictionaries(st.just("binary_data_size"), values)},
)
documents = st.one_of(
    st.fixed_dictionaries({"rows": st.lists(rows, max_size=3)}),
    st.fixed_dictionaries({"columns": st.dictionaries(names, st.lists(values, max_size=3))}),
    st.fixed_dictionaries(
        {"columns": st.fixed_dictionaries({name: st.lists(values, min_size=2, max_size=2) for name in FILMS})}
    ),
    st.fixed_dictionaries({"inputs": st.lists(tensors, max_size=6)}),
    values,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents, st.booleans(), st.data())
def test_any_document(film_server, capfd, document, is_infer, data):
    """Every document has an answer: predictions, or an error of one line; and nothing is logged as an error."""
    body = json.dumps(document).encode()
    if data.draw(st.booleans()):  # change some bytes
        at = data.draw(st.integers(0, len(body)))
        body = body[:at] + data.draw(st.binary(max_size=3)) + body[at + data.draw(st.integers(0, 3)) :]
    headers = {BINARY: str(data.draw(st.integers(0, len(body) + 2)))} if is_infer and data.draw(st.booleans()) else {}
    answer = film_server.infer(body, headers) if is_infer else film_server.predict(body)
    assert answer.status in (200, 400, 413), answer
    if answer.status == 400:
        assert answer.error and "\n" not in answer.error
    assert "error" not in capfd.readouterr().err
