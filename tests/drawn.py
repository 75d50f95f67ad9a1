"""Draw which cases a quick rung tries, by the test's name and the commit; `make test-slow` tries all.

A value with the mark `drawn` is one of those to draw from: a third of a function's cases, or with `drawn(n)` one of n;
rounded, and at least one.
Values without it are always tried: the simplest and the strongest. HOSTDEV_DRAW=TEXT stands for the commit;
"all" tries all.

A quick rung spends about BUDGET seconds, on average, on a function that is in tests/seconds.json, which
`python -m tests.durations --record` writes: the seconds of one case, by function. It draws so many cases, and a
function whose single case takes longer on some commits only. The mark `always`, and the files of ALWAYS, are left out.

On the simulated accelerator all cases are to draw from, except those in tests/device, of random models, and of the
table in tests/standin/covered.json: the tests that notice a missing wait.
"""

import hashlib
import json
import os
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

VARIABLE = "HOSTDEV_DRAW"
BUDGET = 0.4  # seconds
ALWAYS = ("typing/", "modes/", "device/test_faults", "test_command_lines", "test_house", "test_names", "test_packaging")
SECONDS = Path(__file__).parent / "seconds.json"
COVERED = Path(__file__).parent / "standin/covered.json"
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


def mark_on_standin(items):
    """Mark what the quick rung on the simulated accelerator may leave to the draw."""
    kept = {test for tests in json.loads(COVERED.read_text()).values() for test in tests}
    for item in items if kept else ():  # without the table, all are needed
        is_kept = item.nodeid in kept or item.nodeid.startswith(("tests/device/", "tests/runtime/test_random"))
        item.add_marker(pytest.mark.always if is_kept else pytest.mark.drawn)


def mark(items):
    """Mark the cases that are not drawn slow; none if HOSTDEV_DRAW is "all"."""
    if seed() == "all":
        return
    functions, seconds = defaultdict(list), json.loads(SECONDS.read_text())
    for item in items:
        if not item.get_closest_marker("slow") and not item.get_closest_marker("always"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        marked = [item for item in cases if item.get_closest_marker("drawn")]
        most = [len(cases)]
        if marked:
            (share,) = marked[0].get_closest_marker("drawn").args or (3,)
            most.append(max(1, round(len(marked) / share)))
        if name in seconds and not name.removeprefix("tests/").startswith(ALWAYS):
            one = BUDGET / seconds[name]  # cases
            most.append(round(one) if one >= 1 or marked else int(_draw(name)[0] < 256 * one))
            marked = marked or cases
        marked.sort(key=lambda item: _draw(item.nodeid))
        for item in marked[min(most) :]:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.not_drawn)


def _draw(name):
    return hashlib.sha256(f"{seed()} {name}".encode()).digest()
