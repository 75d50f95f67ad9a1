"""Claim: a served Wide & Deep of 5 million rows has at least 0.7 of Predictor's batch rate, and p99 within 3 x its own.

`hostdev serve` runs on one half of the processors, and all clients on the other. Predictor runs on the server's half
beforehand: its time for one row, and its rate in batches of the run's batch size. The same requests go to the same
model as plain torch behind the same framework (peers/torch_serve.py, which also encodes values by hostdev), in turn;
and the dense layers are timed beside ONNX Runtime. Requests are JSON with columns, or tensors of the Open Inference
Protocol in binary, which the peer does not have.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import hostdev
from bench.record import get_versions, make_parser, record
from bench.serving_load import write_requests
from bench.serving_rows import ROWS, make_rows

ROOT = Path(__file__).resolve().parents[1]
REQUESTS = 256  # that differ
CLIENTS = 1, 8, 64


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--table-rows", type=int, default=5_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options)
    given = {name: getattr(options, name) for name in ("table_rows", "dim", "batch_size", "seconds")}
    versions = get_versions("torch", "onnxruntime", "starlette", "uvicorn")
    record("serve", {**given, "versions": versions, **result}, options.out)


def measure(folder: Path, options: Any) -> dict[str, Any]:
    """Return what was measured."""
    cpus = sorted(os.sched_getaffinity(0))
    half = max(1, len(cpus) // 2)
    of_server, of_clients = cpus[:half], cpus[half:] or cpus
    _make(folder, options)
    checkpoint = folder / "run/checkpoints"
    direct = json.loads(
        _call(of_server, "bench.serving_direct", checkpoint, folder / "onnx/dense.onnx", half, options.batch_size)
    )
    requests = _write_requests(folder, checkpoint)
    serve = ["hostdev", "serve", "--checkpoint", checkpoint, "--port", 0]
    peer = ["bench.peers.torch_serve", checkpoint, half]
    found: dict[tuple[str, str, int, int], list[dict[str, float]]] = {}
    with _serving(of_server, *serve) as own_port, _serving(of_server, *peer) as peer_port:
        for _ in range(options.rounds):
            for clients in options.clients:
                for (form, rows), path in requests.items():
                    for name, port in (("hostdev", own_port), ("torch", peer_port)):
                        if name == "torch" and form == "binary":
                            continue
                        text = _call(of_clients, "bench.serving_load", port, clients, options.seconds, path)
                        found.setdefault((name, form, rows, clients), []).append(json.loads(text))
    cases = [
        {
            "server": name,
            "form": form,
            "rows": rows,
            "clients": clients,
            **{key: statistics.median(one[key] for one in rounds) for key in ("per_s", "p50_ms", "p99_ms")},
            "not_200": sum(one["not_200"] for one in rounds),
            "rounds": rounds,
        }
        for (name, form, rows, clients), rounds in found.items()
    ]
    ratios = _show(cases, direct, options)
    return {"cpus_of_server": len(of_server), "ratios": ratios, "direct": direct, "cases": cases}


def _make(folder: Path, options: Any) -> None:
    """Prepare data, train a few steps, and export the dense layers."""
    make = ["--rows", 4 * options.batch_size, "--hash-buckets", options.table_rows, "--out", folder / "data"]
    _call(None, "hostdev.data.preprocess", "synthetic", *make)
    flags = ["--host-device-mix", "--device", "cpu", "--batch-size", options.batch_size, "--emb-dim", options.dim]
    flags += ["--epochs", 1, "--checkpoint-every", 100, "--run-dir", folder / "run"]
    _call(None, "hostdev.train", "--data", folder / "data", *flags)
    _call(None, "hostdev", "checkpoint", "export", folder / "run", "--out", folder / "onnx", "--format", "onnx")


def _write_requests(folder: Path, checkpoint: Path) -> dict[tuple[str, int], Path]:
    """Write the requests of each form and number of rows into a file; return the files."""
    predictor = hostdev.Predictor(checkpoint)
    found = {}
    for rows in ROWS:
        columns = make_rows(predictor, REQUESTS * rows)
        for form, build in (("columns", _in_columns), ("binary", _in_binary)):
            parts = (
                {name: values[i : i + rows] for name, values in columns.items()}
                for i in range(0, REQUESTS * rows, rows)
            )
            found[form, rows] = folder / f"{form}-{rows}"
            write_requests(found[form, rows], [build(part) for part in parts])
    return found


def _in_columns(columns: dict[str, list[Any]]) -> bytes:
    body = json.dumps({"columns": columns}).encode()
    return _request("/v1/predict", body, "Content-Type: application/json\r\n")


def _in_binary(columns: dict[str, list[Any]]) -> bytes:
    inputs, contents = [], []
    for name, values in columns.items():
        if isinstance(values[0], str):
            content = b"".join(len(each).to_bytes(4, "little") + each.encode() for each in values)
        else:
            content = np.array(values, "<f8").tobytes()
        kind = "BYTES" if isinstance(values[0], str) else "FP64"
        about = {"binary_data_size": len(content)}
        inputs.append({"name": name, "datatype": kind, "shape": [len(values)], "parameters": about})
        contents.append(content)
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    more = f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(head)}\r\n"
    return _request("/v2/models/wide_deep/infer", head + b"".join(contents), more)


def _request(path: str, body: bytes, more: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: bench\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _show(cases: Sequence[dict[str, Any]], direct: dict[str, Any], options: Any) -> dict[str, float]:
    """Print a table; return the ratios of the claim."""
    print("Predictor      " + _spaced("rows", "p50 ms", "p99 ms", "rows/s"))
    for n, each in direct["predictor"].items():
        print(
            "               "
            + _spaced(n, f"{each['p50_ms']:.2f}", f"{each['p99_ms']:.2f}", f"{each['rows_per_s']:,.0f}")
        )
    for n, each in direct["dense"].items():
        ratio = each["onnxruntime_ms"] / each["torch_ms"]
        times = f"torch {each['torch_ms']:.3f} ms, ONNX Runtime {each['onnxruntime_ms']:.3f} ms"
        print(f"dense layers, {n} rows: {times} ({ratio:.2f}x)")
    print(_spaced("server", "form", "rows", "clients", "p50 ms", "p99 ms", "requests/s", "rows/s"))
    by_case = {(one["server"], one["form"], one["rows"], one["clients"]): one for one in cases}
    for (name, form, rows, clients), one in by_case.items():
        rate = f"{one['per_s']:,.0f}", f"{rows * one['per_s']:,.0f}"
        print(_spaced(name, form, rows, clients, f"{one['p50_ms']:.2f}", f"{one['p99_ms']:.2f}", *rate))
    most, batch = max(options.clients), direct["predictor"][str(options.batch_size)]["rows_per_s"]
    ratios = {}
    for form in ("columns", "binary"):
        one = by_case["hostdev", form, ROWS[0], min(options.clients)]
        ratios[f"{form}: p99 of one row at one client / Predictor's"] = (
            one["p99_ms"] / direct["predictor"]["1"]["p99_ms"]
        )
        rate = ROWS[-1] * by_case["hostdev", form, ROWS[-1], most]["per_s"]
        ratios[f"{form}: rows/s at {most} clients of {ROWS[-1]} rows / Predictor's in batches"] = rate / batch
    for rows in ROWS:
        for clients in options.clients:
            pair = [by_case[name, "columns", rows, clients]["per_s"] for name in ("hostdev", "torch")]
            ratios[f"columns: requests/s, {rows} rows, {clients} clients / plain torch's"] = pair[0] / pair[1]
    for name, value in ratios.items():
        print(f"{value:6.2f}  {name}")
    return ratios


def _spaced(*values: Any) -> str:
    return "".join(f"{value!s:>12}" for value in values)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _pinned(cpus: Sequence[int] | None) -> Any:
    """Return what a process does before its program begins: it takes its processors."""
    return None if cpus is None else lambda: os.sched_setaffinity(0, cpus)


def _call(cpus: Sequence[int] | None, module: str, *arguments: Any) -> str:
    """Run a module on these processors; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env=_environment(),
        preexec_fn=_pinned(cpus),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"bench serve: {module} failed:\n{done.stderr}")
    return done.stdout


@contextmanager
def _serving(cpus: Sequence[int], module: str, *arguments: Any) -> Iterator[int]:
    """Run a server on these processors within the block, and yield its port."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = subprocess.Popen(command, env=_environment(), preexec_fn=_pinned(cpus), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit():
                port = int(line)
                break
            if line.startswith("serving"):
                port = int(line.split("http://127.0.0.1:")[1].partition(";")[0])
                break
        else:
            sys.exit(f"bench serve: {module} did not start")
        yield port
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
