"""Record how long each test takes, in a file; `python -m tests.durations [FILE ...]` prints the slowest.

A line for each phase of a test: wall seconds, and the CPU seconds of this process and of its children that have ended,
which say more on a machine that does something else, too. The first test that needs a shared fixture pays for it. The
file is durations/NAME.jsonl, where the environment variable names it (the Makefile: by rung), else last.jsonl.

`--record` writes tests/seconds.json, by which the quick rungs draw cases (tests/drawn.py); functions of which the files
have no test keep their seconds.
"""

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path
from time import monotonic  # a reference of its own: tests replace that of the module

import pytest

from tests.drawn import BUDGET, SECONDS

FOLDER = Path(__file__).resolve().parent.parent / "durations"
VARIABLE = "HOSTDEV_DURATIONS"
_WAITS = 1.5  # a test that takes this many times its CPU seconds, beside another one on two cores


class Recorder:
    """The hooks that write the file."""

    def __init__(self, path):
        self._path = path
        self._begin = (0.0, 0.0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._timed(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        return (yield from self._timed(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        return (yield from self._timed(item, "teardown"))

    def _timed(self, item, phase):
        begin = monotonic(), _cpu_seconds()
        try:
            return (yield)
        finally:
            wall, cpu = monotonic() - begin[0], _cpu_seconds() - begin[1]
            line = {"test": item.nodeid, "phase": phase, "wall": round(wall, 3), "cpu": round(cpu, 3)}
            with self._path.open("a") as file:  # one write, which other workers' do not divide
                file.write(json.dumps(line) + "\n")


def configure(config):
    """Start a file for this run, or join that of the run whose worker this is."""
    given = getattr(config, "workerinput", {}).get(VARIABLE)
    if given is None:
        given = os.environ.get(VARIABLE, "last")
        os.environ[VARIABLE] = ""  # pytest, when a test runs it, records nothing
        if given:
            FOLDER.mkdir(parents=True, exist_ok=True)
            given = str(FOLDER / f"{given}.jsonl")
            Path(given).write_text("")
    config.durations_file = given
    if given:
        config.pluginmanager.register(Recorder(Path(given)), "durations_recorder")


def read(paths):
    """Return wall and CPU seconds by test."""
    seconds = defaultdict(lambda: [0.0, 0.0])
    for path in paths:
        for line in path.read_text().splitlines():
            phase = json.loads(line)
            seconds[phase["test"]][0] += phase["wall"]
            seconds[phase["test"]][1] += phase["cpu"]
    return seconds


def table(seconds, key, count):
    """Return the rows of a Markdown table: the groups that took most CPU seconds."""
    groups = defaultdict(lambda: [0, 0.0, 0.0])
    for test, (wall, cpu) in seconds.items():
        group = groups[key(test)]
        group[0] += 1
        group[1] += wall
        group[2] += cpu
    largest = sorted(groups.items(), key=lambda item: -item[1][2])[:count]
    rows = ["| tests | CPU s | wall s | |", "|---:|---:|---:|---|"]
    return [*rows, *(f"| {n} | {cpu:.1f} | {wall:.1f} | {name} |" for name, (n, wall, cpu) in largest)]


def record(seconds):
    """Write the mean seconds of a case of each function that takes more than a tenth of the budget a case.

    They are CPU seconds; wall seconds if it waits for something else than a core, which holds a worker as long.
    """
    cases = defaultdict(list)
    for test, (wall, cpu) in seconds.items():
        cases[test.partition("[")[0]].append(wall if wall > _WAITS * cpu else cpu)
    means = json.loads(SECONDS.read_text())
    means.update({name: round(sum(each) / len(each), 1) for name, each in cases.items()})
    kept = {name: mean for name, mean in sorted(means.items()) if mean >= BUDGET / 10}
    SECONDS.write_text(json.dumps(kept, indent=0) + "\n")


def main():
    parser = argparse.ArgumentParser(prog="tests.durations", description="Print where the tests' time goes.")
    parser.add_argument("files", nargs="*", type=Path, help="default: all files of durations")
    parser.add_argument("--slowest", type=int, default=60, metavar="N", help="tests")
    parser.add_argument("--record", action="store_true", help="write tests/seconds.json, too")
    arguments = parser.parse_args()
    paths = arguments.files or sorted(path for path in FOLDER.glob("*.jsonl") if path.name != "last.jsonl")
    seconds = read(paths)
    if arguments.record:
        record(seconds)
    wall, cpu = (sum(column) for column in zip(*seconds.values(), strict=True))
    print(f"{len(seconds):,} tests: {cpu:,.0f} CPU s, {wall:,.0f} wall s ({', '.join(path.stem for path in paths)})")
    for title, key, count in (
        ("folders", lambda test: test.partition("::")[0].split("/")[1].partition(".")[0], 100),
        ("files", lambda test: test.partition("::")[0], 60),
        ("tests", str, arguments.slowest),
    ):
        print(f"\n## By {title}\n", *table(seconds, key, count), sep="\n")


def _cpu_seconds():
    """Return the CPU seconds of this process and of its ended children."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
