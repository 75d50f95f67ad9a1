"""Where results go: bench/results/, with the command, the commit, the versions and the hardware."""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).resolve().parent / "results"


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def header_of() -> dict[str, Any]:
    """Return what a result must say of its run: the command, the commit, the versions and the hardware."""
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
    """Return a path by its name: where it lies on this machine says nothing to others."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def record(name: str, content: dict[str, Any], path: Path | None = None) -> Path:
    """Write a result as JSON and return its path, which has the date and the name in it unless it is given."""
    header = header_of()
    if path is None:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{header['date']}-{name}.json"
    path.write_text(json.dumps({**header, **content}, indent=2) + "\n")
    return path
