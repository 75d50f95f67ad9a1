"""The Open Inference Protocol v2: parses requests of `infer` and writes their answers, with tensors in JSON or binary.

A body with binary tensors begins with JSON, whose length the header Inference-Header-Content-Length gives. The bytes of
the tensors that have the parameter `binary_data_size` follow, in the order of the tensors in the JSON.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.ext.serving.json_input import Structure, dump, dump_list, parse_json
from hostdev.ext.serving.refused import Limits, bad, too_large
from hostdev.ext.serving.tensors import BYTES, DATATYPES, Tensor, from_binary, from_json

HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY_SIZE = "binary_data_size"
TIMEOUT = "timeout"  # the parameter that limits a request's time, in microseconds
_LONGEST_ID = 1024  # maximum number of characters of a request's id
_MOST_VALUES = 1 << 40  # values of a tensor; no body can hold so many
_TENSOR, _OF_TENSOR = {"name", "shape", "datatype", "parameters", "data"}, {BINARY_SIZE}
_HINTS = {"content_type"}  # parameters that are ignored: they only say how a client's library shows a tensor


@dataclass(frozen=True)
class Inference:
    """A request of `infer`.

    Attributes:
        id: The request's id, which the answer repeats; "" for none.
        model: The model's name and version in the body (kserve's client repeats them there), each None if missing.
        rows: The number of rows, n.
        outputs: For each requested output, by name, whether it is sent in binary; None requests all outputs.
        is_binary: Whether all outputs are sent in binary, if `outputs` is None.
        timeout: Seconds in which the client wants the answer; 0 for no limit.
    """

    id: str
    model: tuple[str | None, str | None]
    inputs: list[Tensor]
    rows: int
    outputs: dict[str, bool] | None
    is_binary: bool
    timeout: float


def split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    """Return a body's JSON, and the bytes after it.

    Args:
        body: The body.
        header_length: The header Inference-Header-Content-Length, or None.

    Raises:
        RefusedError: The header is not a number, or is larger than the body.
    """
    if header_length is None:
        return body, b""
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 20):
        raise bad(f"{HEADER_LENGTH} must be a number of bytes")
    length = int(header_length)
    if length > len(body):
        raise bad(f"{HEADER_LENGTH} is {length:,}, but the body has {len(body):,} bytes")
    return body[:length], body[length:]


def parse(content: bytes, binary: bytes, limits: Limits, structure: Structure | None = None) -> Inference:
    """Parse the body of a request of `infer`.

    Args:
        content: The body's JSON.
        binary: The bytes after it.
        limits: The limits of requests.
        structure: The structure of the JSON, if it was scanned before.

    Raises:
        RefusedError: The body does not follow the protocol, or asks for something that this server does not have.
    """
    found = parse_json(content, structure=structure)
    if not isinstance(found, dict):
        raise bad("the body must be a JSON object with `inputs`")
    _require_known(found, {"id", "model_name", "model_version", "parameters", "inputs", "outputs"}, "the request")
    model, version = found.get("model_name"), found.get("model_version")
    if not all(one is None or isinstance(one, str) for one in (model, version)):
        raise bad("`model_name` and `model_version` must be text")
    name = found.get("id")
    name = "" if name is None else name
    if not isinstance(name, str) or len(name) > _LONGEST_ID:
        raise bad(f"`id` must be text of at most {_LONGEST_ID:,} characters")
    parameters = _parameters(found, {"binary_data_output", "priority", TIMEOUT}, "the request")
    timeout = _whole(parameters, TIMEOUT) / 1e6
    _whole(parameters, "priority")  # has no effect: requests are computed in the order of their arrival
    inputs = _inputs(found.get("inputs"), binary, limits)
    rows = {tensor.shape[0] for tensor in inputs}
    if len(rows) > 1:
        first, other = inputs[0], next(one for one in inputs if one.shape[0] != inputs[0].shape[0])
        raise bad(
            f"input {other.name!r} has {other.shape[0]:,} rows, but input {first.name!r} has {first.shape[0]:,}; give "
            "one value for each row"
        )
    is_binary = _flag(parameters, "binary_data_output", "the request", default=False)
    outputs = _outputs(found.get("outputs"), is_binary)
    return Inference(name, (model, version), inputs, rows.pop(), outputs, is_binary, timeout)


def _inputs(found: Any, binary: bytes, limits: Limits) -> list[Tensor]:
    if not isinstance(found, list) or not found:
        raise bad("the request needs `inputs`, a list of tensors")
    tensors: dict[str, Tensor] = {}
    at = 0
    for content in found:
        name = content.get("name") if isinstance(content, dict) else None
        if not isinstance(name, str):
            raise bad("each of `inputs` must be an object with `name`, `shape`, `datatype` and data")
        what = f"input {name!r}"
        _require_known(content, _TENSOR, what)
        if name in tensors:
            raise bad(f"{what} is given twice")
        datatype = content.get("datatype")
        if not isinstance(datatype, str) or datatype not in DATATYPES:
            raise bad(f"{what}: `datatype` must be one of {', '.join(DATATYPES)}")
        shape = _shape(content.get("shape"), what, limits.most_rows)
        if datatype == BYTES:
            limits.require_few(what, math.prod(shape))
        parameters = _parameters(content, _OF_TENSOR, what)
        if BINARY_SIZE in parameters:
            size = parameters[BINARY_SIZE]
            if type(size) is not int or size < 0:
                raise bad(f"{what}: {BINARY_SIZE} must be a number of bytes")
            if "data" in content:
                raise bad(f"{what} has both `data` and {BINARY_SIZE}; give one")
            if at + size > len(binary):
                raise bad(f"{what} has {size:,} bytes, but the body has {len(binary) - at:,} left for it")
            values = from_binary(name, datatype, shape, binary[at : at + size])
            at += size
        else:
            values = from_json(name, datatype, shape, content.get("data"))
        tensors[name] = Tensor(name, datatype, shape, values)
    if at != len(binary):
        raise bad(f"the body has {len(binary) - at:,} bytes after its last tensor")
    return list(tensors.values())


def _shape(found: Any, what: str, most_rows: int) -> tuple[int, ...]:
    if not isinstance(found, list) or len(found) not in (1, 2) or not all(type(n) is int and n >= 0 for n in found):
        raise bad(f"{what}: `shape` must be [rows], or [rows, values of a row]")
    if found[0] > most_rows:
        raise too_large(f"{what} has more than {most_rows:,} rows; send them in several requests")
    if max(found) > _MOST_VALUES or math.prod(found) > _MOST_VALUES:
        raise bad(f"{what}: `shape` has more values than a body can hold")
    return tuple(found)


def _outputs(found: Any, is_binary: bool) -> dict[str, bool] | None:
    if found is None or found == []:
        return None
    if not isinstance(found, list):
        raise bad("`outputs` must be a list of objects with `name`")
    outputs: dict[str, bool] = {}
    for content in found:
        name = content.get("name") if isinstance(content, dict) else None
        if not isinstance(name, str):
            raise bad("each of `outputs` must be an object with `name`")
        what = f"output {name!r}"
        _require_known(content, {"name", "parameters"}, what)
        if name in outputs:
            raise bad(f"{what} is asked for twice")
        outputs[name] = _flag(_parameters(content, {"binary_data"}, what), "binary_data", what, default=is_binary)
    return outputs


def _parameters(content: Mapping[str, Any], known: set[str], what: str) -> dict[str, Any]:
    found = content.get("parameters")
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise bad(f"`parameters` of {what} must be an object")
    if not found.keys() <= known and (unknown := set(found) - known - _HINTS):
        raise bad(f"{what}: this server has no parameter {min(unknown)!r}")
    return found


def _flag(parameters: Mapping[str, Any], name: str, what: str, *, default: bool) -> bool:
    found = parameters.get(name, default)
    if type(found) is not bool:
        raise bad(f"{what}: {name} must be true or false")
    return found


def _whole(parameters: Mapping[str, Any], name: str) -> int:
    found = parameters.get(name, 0)
    if type(found) is not int or not 0 <= found < 1 << 64:
        raise bad(f"the request: {name} must be a whole number")
    return found


def _require_known(content: Mapping[str, Any], known: set[str], what: str) -> None:
    if not content.keys() <= known:
        raise bad(f"{what} has an unknown entry {min(content.keys() - known)!r}")


def write(
    about: Mapping[str, Any], outputs: Sequence[tuple[str, npt.NDArray[np.float32], bool]]
) -> tuple[bytes, dict[str, str]]:
    """Return the body of an answer and its headers.

    Args:
        about: The answer's entries before `outputs`: the model's name and version, and the request's id.
        outputs: For each output, its name, its values, float32 [n], and whether to write them in binary.
    """
    described, binary = [], []
    for name, values, is_binary in outputs:
        entry: dict[str, Any] = {"name": name, "shape": list(values.shape), "datatype": "FP32"}
        if is_binary:
            binary.append(values.astype("<f4", copy=False).tobytes())
            entry["parameters"] = {BINARY_SIZE: len(binary[-1])}
            described.append(dump(entry))
        else:
            described.append(dump(entry)[:-1] + b',"data":' + dump_list(values.tolist()) + b"}")
    head = dump(dict(about))[:-1] + b',"outputs":[' + b",".join(described) + b"]}"
    if not binary:
        return head, {"Content-Type": "application/json"}
    return b"".join([head, *binary]), {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
