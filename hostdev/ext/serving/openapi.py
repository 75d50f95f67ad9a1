"""The OpenAPI document of a server, with the columns of its model, and the page at /."""

import json
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from hostdev import __version__
from hostdev.ext.serving.columns import RawColumn
from hostdev.ext.serving.model import ServedModel
from hostdev.ext.serving.tensors import DATATYPES

_ERRORS = {
    "400": "The request is wrong; the error names the row and the column where there is one.",
    "401": "The server has a token, and the request does not show it.",
    "404": "There is no such model or version.",
    "413": "The body or its number of rows is too large.",
    "415": "The content type or encoding is not accepted.",
    "503": "The queue is full, or the server is ending; try again.",
}
_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; margin-bottom: 1.5rem }
th, td { text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8886; vertical-align: top }
td:nth-child(2):nth-last-child(2) { overflow-wrap: anywhere } /* paths, the second of three columns */
pre { padding: .8rem; border: 1px solid #8886; border-radius: .3rem; white-space: pre-wrap; overflow-wrap: anywhere }
"""


def describe(name: str, model: ServedModel) -> dict[str, Any]:
    """Return the OpenAPI document for a model that is served under `name`."""
    v2 = f"/v2/models/{name}"
    schemas = {
        "Error": _object({"error": {"type": "string"}}),
        "Rows": _object({"rows": {"type": "array", "items": _ref("Row")}}),
        "Columns": _object({"columns": _object({one.name: _list(one) for one in model.inputs.values()})}),
        "Row": _object({one.name: _value(one) for one in model.inputs.values()}),
        "Predictions": _object(
            {
                "model": {"type": "string"},
                "step": {"type": "integer", "description": "The step of the checkpoint."},
                "predictions": {"type": "array", "items": _prediction(model)},
            }
        ),
        "Tensor": {
            "type": "object",
            "required": ["name", "shape", "datatype"],
            "properties": {
                "name": {"type": "string"},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                "datatype": {"enum": list(DATATYPES)},
                "parameters": {"type": "object"},
                "data": {"type": "array", "items": {}},
            },
        },
        "Inference": {
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "id": {"type": "string"},
                "parameters": {"type": "object"},
                "inputs": {"type": "array", "items": _ref("Tensor")},
                "outputs": {"type": "array", "items": {"type": "object"}},
            },
        },
        "Inferred": _object(
            {
                "model_name": {"type": "string"},
                "model_version": {"type": "string", "description": "The step of the checkpoint."},
                "outputs": {"type": "array", "items": _ref("Tensor")},
            }
        ),
    }
    rows = {"oneOf": [_ref("Rows"), _ref("Columns")]}
    paths = {
        "/v1/predict": {"post": _operation("Predict rows with names", rows, _ref("Predictions"))},
        "/v2": {"get": _operation("The server's name, version and extensions")},
        "/v2/health/live": {"get": _operation("Whether the server runs")},
        "/v2/health/ready": {"get": _operation("Whether the server answers requests")},
        v2: {"get": _operation("The model's version, inputs and outputs")},
        f"{v2}/ready": {"get": _operation("Whether the model answers requests")},
        f"{v2}/infer": {
            "post": _operation("Predict tensors (Open Inference Protocol v2)", _ref("Inference"), _ref("Inferred"))
        },
        f"{v2}/versions/{model.version}/infer": {
            "post": _operation("The same, refused unless this version is served", _ref("Inference"), _ref("Inferred"))
        },
        "/metrics": {"get": _operation("Metrics for Prometheus")},
        "/openapi.json": {"get": _operation("This document")},
    }
    info = {"title": f"hostdev serve: {name}", "version": __version__, "description": f"Step {model.step:,}."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(summary: str, request: Any = None, answer: Any = None) -> dict[str, Any]:
    right: dict[str, Any] = {"description": "The answer."}
    if answer is not None:
        right["content"] = {"application/json": {"schema": answer}}
    found: dict[str, Any] = {"summary": summary, "responses": {"200": right}}
    if request is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": request}}}
        error = {"application/json": {"schema": _ref("Error")}}
        found["responses"] |= {code: {"description": what, "content": error} for code, what in _ERRORS.items()}
    return found


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(about: RawColumn) -> dict[str, Any]:
    return {"type": "array", "items": _value(about)}


def _value(about: RawColumn) -> dict[str, Any]:
    """Return the schema of a row's value in a column; null is a missing value."""
    if about.kind == "number":
        return {"type": ["number", "null"]}
    single = {"type": ["string", "number", "boolean", "null"]}
    if not about.has_lists:
        return single
    how = "A list" if about.separator is None else f"A list, or text with values separated by {about.separator!r}"
    kinds = ["array", "null"] if about.separator is None else ["array", "string", "null"]
    return {"type": kinds, "items": single, "description": f"{how}."}


def _prediction(model: ServedModel) -> dict[str, Any]:
    if len(model.labels) == 1:
        return {"type": "number", "description": f"Of {model.labels[0]}."}
    return _object({label: {"type": "number"} for label in model.labels})


def write(document: dict[str, Any], name: str, model: ServedModel, address: str) -> str:
    """Return the page as HTML, for the OpenAPI document of a model that is served under `name` at an `address`."""
    ends = [
        (method.upper(), path, operation["summary"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    inputs = [(one.name, one.kind, one.datatype, str(list(one.shape)), _how(one)) for one in model.inputs.values()]
    row = {one.name: _example(one) for one in model.inputs.values()}
    body = shlex.quote(json.dumps({"rows": [row]}))
    command = f"curl -H 'Content-Type: application/json' {shlex.quote(f'{address}/v1/predict')} -d {body}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style>'
        f"<h1>{escape(name)}</h1><p>Step {model.step:,}, written {escape(model.predictor.created)}. Outputs: "
        f"{escape(', '.join(model.labels))}. <a href='openapi.json'>OpenAPI document</a></p>"
        f"<h2>Requests</h2>{_table(('', 'path', 'what'), ends)}"
        f"<h2>Inputs</h2>{_table(('name', 'kind', 'data type', 'shape', 'values'), inputs)}"
        f"<h2>Try it</h2><pre>{escape(command)}</pre></html>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _how(one: RawColumn) -> str:
    if not one.has_lists:
        return "one per row"
    return "a JSON list" if one.separator is None else f"a list, or text separated by {one.separator!r}"


def _example(one: RawColumn) -> Any:
    if one.kind == "number":
        return 0
    if one.has_lists:
        return []
    return 1 if one.datatype == "INT64" else "..."
