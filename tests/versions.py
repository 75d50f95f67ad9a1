"""Run tests in an environment of its own, with the lowest versions that pyproject.toml allows or with another Python.

python tests/versions.py --lowest TESTS ...
python tests/versions.py --python python3.13 TESTS ...

The environment is made in a temporary folder and removed at the end. The exit code is 1 where an interpreter or a
version is missing here: a range that nobody has tried is not a pass. `--python none` leaves the tests out, and says so.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("hypothesis", "pandas", "pytest", "pytest-xdist", "scipy", "setuptools")  # that the tests import


def find_python(name):
    """Return the path of an interpreter that runs; None where there is none. A name is looked up in pyenv's, too."""
    found = [shutil.which(name), *sorted(Path.home().glob(f".pyenv/versions/*/bin/{Path(name).name}"))]
    for path in filter(None, found):
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return str(path)
    return None


def pinned():
    """Return the lines of constraints.txt by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {line.split("==")[0]: line for line in lines if "==" in line}


def lowest():
    """Return the project's dependencies, each at the lowest version of its range."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    made = []
    for requirement in wanted:
        assert re.fullmatch(r"[\w.-]+>=[\d.]+", requirement), f"{requirement}: not a range of the form name>=version"
        made.append(requirement.replace(">=", "=="))
    return made


def run(*command, **options):
    """Run a command; return its exit code."""
    print("$", *command, flush=True)
    return subprocess.run([*map(str, command)], cwd=ROOT, check=False, **options).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--lowest", action="store_true", help="the lowest versions, with this Python")
    which.add_argument("--python", help="another interpreter, with the pinned versions; none: leave it out")
    parser.add_argument("tests", nargs="+")
    arguments = parser.parse_args()
    job = "lowest versions" if arguments.lowest else f"Python {arguments.python}"
    if arguments.python == "none":
        print("SKIPPED: the tests with another Python were left out (--python none)")
        return 0
    python = sys.executable if arguments.lowest else find_python(arguments.python)
    if python is None:
        print(f"FAILED: {job}: this machine has no such interpreter; give its path, or none to leave the job out")
        return 1
    if arguments.lowest:  # with the newest tools that go with them
        constraints, wanted = lowest(), [*lowest(), *TOOLS]
    else:
        constraints, wanted = list(pinned().values()), list(TOOLS)
    with tempfile.TemporaryDirectory(prefix="hostdev-versions-") as name:
        env = Path(name) / "env"
        file = Path(name) / "constraints.txt"
        file.write_text("\n".join(constraints) + "\n")
        own = env / "bin/python"
        pip = (own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--constraint", file)
        if run(python, "-m", "venv", env) or run(*pip, "--only-binary", ":all:", *wanted):
            print(f"FAILED: {job}: these versions cannot be installed here; pip says why above. No test was run")
            return 1
        if run(*pip, "--editable", ROOT):
            print(f"FAILED: {job}: hostdev cannot be installed with these versions. No test was run")
            return 1
        run(own, "-m", "pip", "--disable-pip-version-check", "list", "--format", "freeze")
        variables = {**os.environ, "OMP_WAIT_POLICY": "passive", "NUMBA_CACHE_DIR": str(Path(name) / "numba")}
        tests = ("-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-m", "not slow")
        code = run(own, *tests, *arguments.tests, env=variables)
    print(f"{'FAILED' if code else 'passed'}: {job}: the fast tests, exit code {code}")
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
