"""What all benchmarks share: options, and results with their command, commit, versions and hardware."""

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
    """Return a parser for a benchmark's options, with a module's docstring as its description, and with --out."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python {sys.argv[0]}", description=doc, formatter_class=how)
    if out:
        parser.add_argument("--out", type=Path, help="file for the result, instead of one in bench/results/")
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
    """Return the command, the date, the commit, Python's version and the hardware of this run."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS.parent)
        commit = found.stdout.strip()
    except OSError:  # no git here
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
    """Return the name of an absolute path: its folders on this machine say nothing to others."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def record(name: str, content: dict[str, Any], path: Path | None = None) -> Path:
    """Write a result as JSON, print and return its path: by default DATE-NAME.json in bench/results/."""
    header = make_header()
    if path is None:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{header['date']}-{name}.json"
    path.write_text(json.dumps({**header, **content}, indent=2) + "\n")
    print(f"\nwritten to {path}")
    return path
