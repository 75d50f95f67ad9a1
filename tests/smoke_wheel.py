"""Build the wheel, install it in a new environment, and train with it from another folder: `make wheel`.

With --alone its dependencies are installed there, too, which takes minutes; otherwise this environment's are used, and
pip checks that they are complete.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command, cwd, expect=0):
    """Run a command; return its output, or end with it if the exit code is not the expected one."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["XDG_CACHE_HOME"] = str(cwd / "cache")
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != expect:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_contents(wheel):
    """Check that the wheel has every source file under its name, and only the package at top level."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = set()
    for top, place in {"hostdev": "hostdev", "models": "hostdev/models", "data": "hostdev/data"}.items():
        for path in (ROOT / top).rglob("*.py"):
            name = f"{place}/{path.relative_to(ROOT / top).as_posix()}"
            sources.add(name)
    assert sources == {name for name in inside if name.endswith(".py")}, sources ^ inside
    assert "hostdev/py.typed" in inside
    assert {name.split("/")[0].split("-")[0] for name in inside} == {"hostdev"}, "more than the package at top level"


def check_stranger(work, python, pip, elsewhere):
    """Check that a package outside hostdev adds its things to the installed wheel, which pass hostdev's checks."""
    source, out = work / "stranger", work / "theirs"
    shutil.copytree(ROOT / "tests/stranger", source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=work)
    [wheel] = out.glob("*.whl")
    run(*pip, "install", "--quiet", "--no-deps", wheel, cwd=work)
    assert "all checks passed" in run(python, "-m", "acme.checks", elsewhere / "checks", cwd=elsewhere)
    assert run(python, "-m", "hostdev", "greet", "--name", "you", cwd=elsewhere) == "hello, you\n"


def main():
    """Build, install, train."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostdev-wheel-") as name:
        work = Path(name)
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # it may hold modules that were removed
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", work / "dist", ROOT, cwd=work)
        [wheel] = (work / "dist").glob("*.whl")
        check_contents(wheel)
        run(sys.executable, "-m", "venv", "--without-pip", work / "env", cwd=work)
        python = work / "env/bin/python"
        alone = sys.argv[1:] == ["--alone"]
        if not alone:  # a .pth file's paths are searched, and the checkout that is installed there is not found
            [site] = (work / "env").glob("lib/python*/site-packages")
            (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
        given = ["-c", ROOT / "constraints.txt"] if alone else ["--no-deps", "--ignore-installed"]
        pip = (sys.executable, "-m", "pip", "--python", python)
        run(*pip, "install", "--quiet", *given, wheel, cwd=work)
        run(*pip, "check", cwd=work)
        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        check_stranger(work, python, pip, elsewhere)
        for package in ("models", "data", "tests"):
            run(python, "-c", f"import {package}", cwd=elsewhere, expect=1)
        place = run(python, "-c", "import hostdev; print(hostdev.__file__)", cwd=elsewhere)
        assert Path(place).is_relative_to(work), place
        run(python, "-c", "import hostdev; hostdev.HostTable(3, 2, hostdev.FTRL(), name='t')", cwd=elsewhere)
        assert "--host-device-mix" in run(python, "-m", "hostdev.train", "--help", cwd=elsewhere)
        out = run(python, "-m", "hostdev.train", "--host-device-mix", "--max-steps", 5, cwd=elsewhere)
        print(out)
        here = run(sys.executable, "-m", "hostdev.train", "--host-device-mix", "--max-steps", 5, cwd=elsewhere)
        assert digest(out) == digest(here), "the wheel and the checkout trained different models"
    print(f"wheel: built, installed elsewhere, trained to the checkout's digest, {time.monotonic() - start:.0f} s")


def digest(output):
    """The state_sha256 that a run printed."""
    [line] = [line for line in output.splitlines() if line.startswith("state_sha256")]
    return line.split()[1]


if __name__ == "__main__":
    main()
