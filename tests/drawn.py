"""Draw which values of a parameter a quick rung tries, by the test's name and the commit; `make test-slow` tries all.

A value with the mark `drawn` is one of those to draw from: a third of a function's cases, rounded, and at least one.
Values without it are always tried: the simplest and the strongest. HOSTDEV_DRAW=TEXT stands for the commit.
"""

import hashlib
import os
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

VARIABLE = "HOSTDEV_DRAW"
_ROOT = Path(__file__).resolve().parent.parent


@cache
def seed():
    """Return what the draw depends on beside a test's name: the commit, or "" outside of a repository."""
    if VARIABLE not in os.environ:
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        try:
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        except OSError:  # no git
            return ""
        return done.stdout.strip()
    return os.environ[VARIABLE]


def mark(items):
    """Mark the cases that are not drawn slow."""
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        cases.sort(key=lambda item: hashlib.sha256(f"{seed()} {item.nodeid}".encode()).digest())
        for item in cases[max(1, round(len(cases) / 3)) :]:
            item.add_marker(pytest.mark.slow)
