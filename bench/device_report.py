"""Claim: on this device all tests pass, all modes give the same bits, and host tables keep up with device tables.

The report runs the tests and benchmarks that need an accelerator, each in a process with a time limit. It writes
device-report.json, and a summary in Markdown beside it. If a part fails, the report stores the end of its output and
continues with the other parts. The exit code is 0; 1 if anything failed (a missed speed target is not a failure); 2
without a device.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.record import make_header, make_parser
from bench.report_parts import MODES, PRECISIONS, SIZES, Part, make_parts
from bench.report_summary import format_summary
from hostdev.core.errors import UserError
from hostdev.device import backend

ROOT = Path(__file__).resolve().parent.parent
TARGET = 0.9  # samples/s of host tables with a cache over those of device tables
TAIL = 4000  # characters of a failed part's output
CACHED, HOST, ON_DEVICE = "host tables, cache 10%", "host tables", "device tables"


def run(part: Part, log: Path) -> dict[str, Any]:
    """Run a part; return its result for the report."""
    start = time.perf_counter()
    code, problem, found = None, "", {}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "COLUMNS": "160"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as file:
        process = subprocess.Popen(
            part.command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            problem = f"not done after {part.limit} s"
        finally:
            if process.poll() is None:  # ends the process and all that it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    output = log.read_text(errors="replace")
    try:
        found, wrong = part.read(output)
        problem = problem or wrong
    except Exception as error:  # a failed process may have left any content
        problem = problem or f"its result could not be read: {type(error).__name__}: {error}"
    if code not in (0, None):
        problem = f"exit code {code}" + f"; {problem}" * bool(problem)
    result = {
        "name": part.name,
        "command": shlex.join(part.command),
        "status": "failed" if problem else "passed",
        "problem": problem,
        "exit_code": code,
        "seconds": round(time.perf_counter() - start, 1),
        **({"found": found} if found else {}),
    }
    return {**result, "output_tail": output[-TAIL:]} if problem else result


def compare_trainings(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the trainings: their digests must be equal, and their rates have a target."""
    found = {part["name"]: part.get("found", {}) for part in parts}
    checks = []
    for precision in PRECISIONS:
        runs = {mode: found.get(f"train {precision}, {mode}", {}) for mode in MODES}
        digests = {mode: run.get("state_sha256") for mode, run in runs.items()}
        equal = len(set(digests.values())) == 1 and None not in digests.values()
        checks.append(
            {
                "check": f"{precision}: the same state_sha256 with {', '.join(MODES)}",
                "met": equal,
                "must": True,
                "values": digests,
            }
        )
        rates = {mode: run.get("samples_per_second") for mode, run in runs.items()}
        checks.append(_rate_check(f"{precision}, training", rates))
        checks.append(_rate_check(f"{precision}, bench_pipeline", _bench_rates(found, precision)))
    return checks


def _rate_check(what: str, rates: dict[str, float | None]) -> dict[str, Any]:
    ratios = {
        mode: round(rates[mode] / rates[ON_DEVICE], 3)
        for mode in (HOST, CACHED)
        if rates.get(mode) and rates.get(ON_DEVICE)
    }
    return {
        "check": f"{what}: samples/s with {CACHED} at least {TARGET} of device tables",
        "must": False,
        "met": ratios.get(CACHED, 0.0) >= TARGET,
        "values": {"samples_per_s": rates, "ratios": ratios},
    }


def _bench_rates(found: dict[str, Any], precision: str) -> dict[str, float | None]:
    """Return the best samples/s of each mode in the benchmark `pipeline`."""
    rates: dict[str, float | None] = {}
    for row in found.get("bench_pipeline", {}).get("accelerator", []):
        name = row["run"].removeprefix(f"{precision} ")
        if name != row["run"]:
            tables = name.split(",")[0]
            mode = CACHED if "cache" in name else tables
            rates[mode] = max(rates.get(mode) or 0.0, row["samples_per_s"])
    return rates


def write(report: dict[str, Any], out: Path) -> str:
    """Write the report and its summary; return the summary."""
    report["checks"] = compare_trainings(report["parts"])
    report["failed"] = [part["name"] for part in report["parts"] if part["status"] != "passed"]
    report["failed"] += [check["check"] for check in report["checks"] if check["must"] and not check["met"]]
    out.write_text(json.dumps(report, indent=2) + "\n")
    summary = format_summary(report)
    out.with_suffix(".md").write_text(summary)
    return summary


def find_device(name: str) -> str | None:
    """Return the device's name for the parts; None without an accelerator; UserError if torch has no such device."""
    device = backend.select(name)
    return str(device) if backend.is_accelerator(device) or name == "cpu" else None


def main() -> int:
    """Run all parts, and write the report after each of them."""
    parser = make_parser(__doc__)
    parser.set_defaults(out=Path("device-report.json"))
    parser.add_argument("--device", default="auto", help="the accelerator; cpu: a small trial of the report itself")
    parser.add_argument("--quick", action="store_true", help="fewer steps: minutes instead of up to an hour")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as for Ctrl-C, the running part is ended, too
    try:
        device = find_device(arguments.device)
    except UserError as error:
        print(f"device_report: {error}", file=sys.stderr)
        return 2
    if device is None:
        print(
            f"device_report: needs an accelerator that torch sees, such as a CUDA GPU with its driver and a torch "
            f"built for it; torch {torch.__version__} sees none (--device cpu tries the report itself)",
            file=sys.stderr,
        )
        return 2
    size = "trial" if device == "cpu" else "quick" if arguments.quick else "full"
    report: dict[str, Any] = {**make_header(), "size": size, "trial": size == "trial", "device": device, "parts": []}
    summary = ""
    with tempfile.TemporaryDirectory(prefix="device-report-") as folder:
        parts = make_parts(device, SIZES[size], Path(folder))
        report["planned"] = [part.name for part in parts]
        for number, part in enumerate(parts, 1):
            print(f"[{number:>2}/{len(parts)}] {part.name:<40}", end="", flush=True)
            result = run(part, Path(folder) / f"{number}.log")
            print(f"{result['status']:<8}{result['seconds']:>8.1f} s  {result['problem']}", flush=True)
            report["parts"].append(result)
            summary = write(report, arguments.out)
    print(f"\n{summary}\nwritten to {arguments.out} and {arguments.out.with_suffix('.md')}")
    return 1 if report["failed"] else 0
