"""The parts of a device report: each one's command, its time limit, and the reader of its results."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Findings = dict[str, Any]
_VERIFIED = re.compile(r"^(host tables|device tables) .*?([0-9a-f]{16})  (.+)$")
_NOT_RUN = re.compile(r"^((?:host|device) tables .*?)not run: (.+)$")


class Part(NamedTuple):
    """One command of a report."""

    name: str
    command: list[str]
    limit: int  # seconds
    read: Callable[[str], tuple[Findings, str]]  # from the output: the findings, and the problem or ""


class Size(NamedTuple):
    """The extent of a report."""

    data: list[str]  # options of the preprocessing; empty: the small synthetic data set
    train: list[str]
    verify: list[str]
    device: list[str]
    pipeline: list[str]
    marked: list[str]
    tests: list[str]
    triton: str  # selects tests of Triton's operations


_TESTS = (["-m", "device and not slow"], ["tests/device"], "cuda")
SIZES = {
    # The small synthetic data set has too few steps for a steady rate, so the same generator makes more rows.
    "full": Size(
        ["--rows", "1000000", "--threshold", "5", "--dense", "log", "--test-fraction", "0.02"],
        ["--epochs", "10", "--batch-size", "16000"],
        [],
        [],
        [],
        *_TESTS,
    ),
    "quick": Size(
        [], [], ["--steps", "6", "--batch-size", "1000"], ["--rounds", "10"], ["--steps", "8", "--depths", "2"], *_TESTS
    ),
    "trial": Size(
        [],
        ["--epochs", "1", "--batch-size", "200", "--max-steps", "4", "--emb-dim", "8"],
        ["--steps", "2", "--batch-size", "50", "--emb-dim", "8"],
        ["--rounds", "2"],
        ["--steps", "1", "--depths", "2"],
        [*_TESTS[0], "tests/device"],
        ["tests/device/test_device.py"],
        "twins and assemble",
    ),
}
VERIFIED = {"fp32": [], "bf16": ["--precision", "bf16"], "l2 batch": ["--l2", "batch"], "l2 table": ["--l2", "table"]}
PRECISIONS = ("fp32", "bf16")
MODES = {
    "device tables": [],
    "host tables": ["--host-device-mix"],
    "host tables, cache 10%": ["--host-device-mix", "--cache-rows", "10%"],
}


def make_parts(device: str, size: Size, folder: Path) -> list[Part]:
    """Return the parts of a report on a device, in order; they write their files to `folder`."""
    python, where = [sys.executable], ["--device", device]

    def bench(name: str, script: str, *arguments: str, limit: int) -> Part:
        out = folder / f"{script}.json"
        command = [*python, "-m", "bench", script.removeprefix("bench_"), *where, *arguments, "--out", str(out)]
        return Part(name, command, limit, lambda output: (json.loads(out.read_text()), ""))

    data = folder / "data"
    make = [*python, "-m", "hostdev.data.preprocess", "synthetic", "--out", str(data), *size.data]
    given = ["--data", str(data)] if size.data else []
    return [
        bench("machine", "machine", limit=600),
        _tests("tests marked device", [*size.marked], folder / "marked.xml", 3600),
        _tests("tests/device", [*size.tests], folder / "device.xml", 3600),
        _tests(
            f"Triton's operations, {size.triton}",
            ["tests/device/test_triton_ops.py", "-k", size.triton],
            folder / "triton.xml",
            1800,
        ),
        *([Part("data", make, 900, lambda output: ({"made": output.strip().splitlines()[-1]}, ""))] if given else []),
        *(
            Part(f"verify {name}", [*python, "-m", "hostdev.verify", *where, *flags, *size.verify], 1800, _verified)
            for name, flags in VERIFIED.items()
        ),
        *(
            _training(precision, mode, [*where, *given, *size.train], folder)
            for precision in PRECISIONS
            for mode in MODES
        ),
        bench("bench_device", "bench_device", *size.device, limit=2400),
        bench("bench_pipeline", "bench_pipeline", "--only", "accelerator", *size.pipeline, limit=2400),
    ]


def _tests(name: str, selected: list[str], xml: Path, limit: int) -> Part:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={xml}", *selected]
    return Part(name, command, limit, lambda output: _tested(xml))


def _tested(xml: Path) -> tuple[Findings, str]:
    """Return the counts of tests, the names of failed tests and the reasons for skips, and the problem."""
    failed, skipped, count = [], Counter[str](), 0
    for case in ET.parse(xml).iter("testcase"):
        count += 1
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            skipped[skip.get("message", "")] += 1
    passed = count - len(failed) - sum(skipped.values())
    found = {
        "passed": passed,
        "failed": len(failed),
        "skipped": sum(skipped.values()),
        "failures": failed,
        "skip_reasons": dict(skipped),
    }
    return found, f"{len(failed)} tests failed" if failed else "" if passed else "no test ran"


def _verified(output: str) -> tuple[Findings, str]:
    """Return every mode's digest and the modes that differ from the first or were not run, and the problem."""
    digests, different, not_run = {}, [], []
    for line in output.splitlines():
        if match := _VERIFIED.match(line):
            mode = " ".join(line[: match.start(2)].split())
            digests[mode] = match[2]
            if match[3] not in ("the reference", "equal"):
                different.append(f"{mode}: {match[3]}")
        elif match := _NOT_RUN.match(line):
            not_run.append(f"{' '.join(match[1].split())}: {match[2]}")
    found = {"modes": len(digests), "digests": digests, "different": different, "not_run": not_run}
    on_device = any(mode.startswith("device tables") for mode in digests)
    problem = f"{len(different)} modes differ" if different else "" if on_device else "not all modes were run"
    return found, problem


def _training(precision: str, mode: str, arguments: list[str], folder: Path) -> Part:
    run = folder / f"run {precision} {mode}"
    command = [
        sys.executable,
        "-m",
        "hostdev.train",
        *arguments,
        "--precision",
        precision,
        *MODES[mode],
        "--run-dir",
        str(run),
    ]

    def read(output: str) -> tuple[Findings, str]:
        summary = json.loads((run / "summary.json").read_text())
        found = {
            key: summary[key] for key in ("status", "steps", "samples_per_second", "state_sha256", "auc", "device")
        }
        found |= {
            key: summary["pipeline"][key]
            for key in ("overlap_efficiency", "host_busy_us", "device_busy_us", "wall_us", "stall_us")
        }
        if "cache" in summary:
            found["hit_rate"] = summary["cache"]["hit_rate"]
        return found, "" if summary["status"] == "finished" else f"the run {summary['status']}"

    return Part(f"train {precision}, {mode}", command, 1800, read)
