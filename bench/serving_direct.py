"""`Predictor` in a process of its own, for the benchmark `serve`; also its dense layers beside ONNX Runtime.

`python -m bench.serving_direct CHECKPOINT NETWORK THREADS BATCH` prints one JSON object.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import torch

import hostdev
from bench.serving_rows import ROWS, make_rows
from hostdev.ext.predict.onnx_export import get_inputs, get_values
from hostdev.kernels.pool import set_host_threads

SECONDS = 3.0


def measure(call: Callable[[int], Any], seconds: float = SECONDS) -> list[float]:
    """Return the seconds of each call, which get the numbers from 0 on, after a warm-up."""
    times: list[float] = []
    begin = time.perf_counter()
    while (start := time.perf_counter()) < begin + 1.2 * seconds:
        call(len(times))
        if start > begin + 0.2 * seconds:
            times.append(time.perf_counter() - start)
    return times


def main(checkpoint: str, network: str, threads: int, batch: int) -> dict[str, Any]:
    """Return Predictor's times and rates, and those of the dense layers."""
    torch.set_num_threads(threads)
    set_host_threads(threads)
    predictor = hostdev.Predictor(checkpoint)
    columns = make_rows(predictor, 256 * max(ROWS))
    found: dict[str, Any] = {}
    for rows in (*ROWS, batch):
        parts = [_part(columns, start, rows) for start in range(0, len(columns["I1"]) - rows + 1, rows)][:256]
        times = measure(lambda number: predictor(parts[number % len(parts)]))  # noqa: B023
        p50, p99 = np.percentile(times, (50, 99)) * 1e3
        found[str(rows)] = {"p50_ms": p50, "p99_ms": p99, "rows_per_s": rows * len(times) / sum(times)}
    return {"predictor": found, "dense": _dense(predictor, columns, network, threads, batch)}


def _part(columns: dict[str, list[Any]], start: int, rows: int) -> dict[str, list[Any]]:
    return {name: values[start : start + rows] for name, values in columns.items()}


def _dense(
    predictor: hostdev.Predictor, columns: dict[str, list[Any]], network: str, threads: int, batch: int
) -> dict[str, Any]:
    """Return the milliseconds of the dense layers by torch and by ONNX Runtime, from rows that are looked up."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
    inputs = get_inputs(predictor.model, len(predictor.data.schema.dense))
    found = {}
    for n in (*ROWS, batch):
        encoded = predictor.encode(_part(columns, 0, n))
        rows, dense = predictor.rows(encoded), torch.from_numpy(encoded.dense)
        given = {name: values.numpy() for name, values in get_values(predictor, inputs, encoded).items()}
        with torch.inference_mode():
            by_torch = np.median(measure(lambda _: predictor.model(dense, rows), 1.0)) * 1e3  # noqa: B023
        by_onnx = np.median(measure(lambda _: session.run(None, given), 1.0)) * 1e3  # noqa: B023
        found[str(n)] = {"torch_ms": by_torch, "onnxruntime_ms": by_onnx}
    return found


if __name__ == "__main__":
    checkpoint, network, threads, batch = sys.argv[1:]
    print(json.dumps(main(checkpoint, network, int(threads), int(batch))))
