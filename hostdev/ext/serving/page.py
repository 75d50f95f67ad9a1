"""The page at /: the served model, and a command to try it."""

import json
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from hostdev.ext.serving.columns import RawColumn
from hostdev.ext.serving.model import ServedModel

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; margin-bottom: 1.5rem }
th, td { text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8886; vertical-align: top }
pre { padding: .8rem; border: 1px solid #8886; border-radius: .3rem; white-space: pre-wrap; overflow-wrap: anywhere }
"""


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
    end = shlex.quote(f"{address}/v1/predict")
    command = f"curl -H 'Content-Type: application/json' {end} -d {body}"
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
