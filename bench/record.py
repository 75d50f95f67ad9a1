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


def record(name: str, content: dict[str, Any]) -> Path:
    """Write a result as JSON and return its path."""
    RESULTS.mkdir(exist_ok=True)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=RESULTS
    ).stdout.strip()
    header = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "python": platform.python_version(),
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }
    path = RESULTS / f"{header['date']}-{name}.json"
    path.write_text(json.dumps({**header, **content}, indent=2) + "\n")
    return path
