"""Raw rows of Criteo's columns for the benchmark `serve`."""

from typing import Any

import numpy as np

import hostdev

ROWS = (1, 64)  # of a request


def make_rows(predictor: hostdev.Predictor, n: int) -> dict[str, list[Any]]:
    """Return n random rows: numbers in I1 to I13, and text of eight digits in C1 to C26."""
    rng = np.random.default_rng(1)
    found: dict[str, list[Any]] = {}
    for name in predictor.encoding.columns():
        if name.startswith("I"):
            found[name] = rng.integers(0, 1000, n).tolist()
        else:
            found[name] = [f"{value:08x}" for value in rng.integers(0, 1 << 32, n).tolist()]
    return found
