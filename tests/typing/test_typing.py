"""mypy's view of the public surface: types in a loop, and misspelt names as errors."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_public_types():
    here = Path(__file__).with_name("public_types.py")
    command = [sys.executable, "-m", "mypy", str(here)]  # with pyproject's options, so that `make types` leaves a cache
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
