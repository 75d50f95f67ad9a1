"""Shared by all benchmarks: their options, and results with the command, the commit, versions and the hardware."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).resolve().parent / "results"


def make_parser(doc: str | None, *, out: bool = True) -> argparse.ArgumentParser:
    """Return a parser for a benchmark's options, described by the module's docstring `doc`; `out` adds --out."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python {sys.argv[0]}", description=doc, formatter_class=how)
    if out:
        parser.add_argument("--out", type=Path, help="file for the result (default: a new one in bench/results/)")
    return parser


def get_versions(*names: str) -> dict[str, str]:
    """Return the versions of hostdev and of other packages."""
    return {name: version(name) for name in ("hostdev", *names)}


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def make_header() -> dict[str, Any]:
    """Return this run's command, date, commit, Python version and hardware."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS.parent)
        commit = found.stdout.strip()
    except OSError:  # git is not installed
        commit = ""
    return {
        "command": " ".join(["python", *map(_without_folder, sys.argv)]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "python": platform.python_version(),
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _without_folder(argument: str) -> str:
    """Return only the name of an absolute path, because its folders mean nothing on other machines."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def record(name: str, content: dict[str, Any], path: Path | None = None) -> Path:
    """Write a result as JSON, and print and return its path, by default DATE-NAME.json in bench/results/."""
    header = make_header()
    if path is None:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{header['date']}-{name}.json"
    path.write_text(json.dumps({**header, **content}, indent=2) + "\n")
    print(f"\nwritten to {path}")
    return path
