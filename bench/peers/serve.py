"""A peer's process: prints its ops, then runs each op whose name it reads and prints the milliseconds."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to find workload.py


def serve(ops: dict[str, Callable[[], object]], versions: dict[str, str]) -> None:
    """Answer on standard output, in one line of JSON per call, until standard input ends."""
    print(json.dumps({"ops": sorted(ops), "versions": versions}), flush=True)
    for line in sys.stdin:
        run = ops[line.strip()]
        start = time.perf_counter()
        run()
        print(json.dumps({"ms": (time.perf_counter() - start) * 1e3}), flush=True)
