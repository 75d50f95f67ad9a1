"""The command lines: what is wrong with them is said before torch, numba and pyarrow are imported."""

import re
import shlex
import subprocess
import sys

import pytest

from hostdev import commands
from hostdev.commands import console, train
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.serving import cli as serve
from tests.conftest import ROOT, environment

WRONG = {
    "train": (["--epoch", 3], "unrecognized arguments: --epoch 3; did you mean --epochs? (see hostdev train --help)"),
    "quickstart": (["--criteo", "nope"], "--criteo nope: there is no such file"),
    "preprocess": (
        ["table", "--labl", "y", "x.csv", "--out", "d"],
        "unrecognized arguments: --labl; did you mean --label? (see hostdev preprocess --help)",
    ),
    "report": (["nope", "--out", "x.html"], "there is no run directory nope"),
    "predict": (
        ["--checkpoint", "x", "--data", "nope", "--out", "p.parquet"],
        "--data nope: there is no such file or data set",
    ),
    "neighbours": (["--checkpoint", "nope", "--of", "x"], "--checkpoint nope does not exist"),
    "serve": (["--checkpoint", "nope"], "--checkpoint nope: there is no such checkpoint or folder"),
    "checkpoint": (["diff", ".", "nope"], "nope does not exist"),
    "advise": (
        ["--data", "nope"],
        "nope is not a data set: it has no manifest.json; create a data set with python -m hostdev.data.preprocess",
    ),
    "verify": (["--steps", 1], "--steps must be at least 2, not 1"),
    "warm-up": (["--jobs", 0], "--jobs must be in 1..256, not 0"),
    "launch": ([], "give --rank-table FILE -- PROGRAM OPTIONS, or --check to test connections"),
}
HEAVY = ("torch", "numba", "pyarrow", "matplotlib", "uvicorn", "starlette")


def run(tmp_path, *arguments, check=""):
    """Run `hostdev` with arguments; then some code."""
    code = (
        "import sys\nfrom hostdev.commands import console\n"
        f"try:\n    code = console.main()\nexcept SystemExit as end:\n    code = end.code\n{check}\nsys.exit(code)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_command_has_a_wrong_line():
    assert sorted(WRONG) == sorted(commands.names())


@pytest.mark.parametrize("command", WRONG)
def test_help_and_errors_import_little(tmp_path, command):
    light = f"assert not set({HEAVY!r}) & set(sys.modules)"
    given, message = WRONG[command]
    done = run(tmp_path, command, *given, check=light)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"hostdev {command}: error: {message}\n")
    done = run(tmp_path, command, "--help", check=light)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: hostdev {command} ")
    module = commands.find(command).PROG
    same = subprocess.run(
        [sys.executable, "-m", module, *map(str, given)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert same.stderr == f"{module}: error: {message}\n".replace(f"hostdev {command} --help", f"{module} --help")
    assert same.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_the_program_itself(tmp_path):
    assert run(tmp_path, "--help").stdout == console.text() + "\n"
    assert all(f"  {name} " in console.text() for name in commands.names())
    assert run(tmp_path).returncode == 2
    assert run(tmp_path, "--version").stdout == "hostdev 0.3.0.dev0\n"
    done = run(tmp_path, "trian")
    assert (done.returncode, done.stderr) == (2, "hostdev: error: there is no command 'trian'; did you mean train?\n")
    assert "; the commands are train, quickstart, " in run(tmp_path, "xyz").stderr


@pytest.mark.parametrize("page", ["training", "preparation", "serving"])
def test_the_guides_have_every_option(page):
    text = (ROOT / "docs/guides" / f"{page}.md").read_text()
    if page == "preparation":
        text += (ROOT / "docs/guides/query.md").read_text()
    parser = {"training": train, "preparation": preprocess, "serving": serve}[page].parser()
    options = set(parser._all_options()) - {"--help", "-h", "--debug"}
    assert {option for option in options if f"`{option}" not in text and f"{option} " not in text} == set()


def test_the_readme_is_short_and_its_commands_parse(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 8 << 10
    assert text.partition("## Read on")[2].partition("hostdev is licensed")[0].count("](") <= 6
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "films").mkdir()
    for file in ("ratings.csv", "new.csv", "films/manifest.json"):
        (tmp_path / file).touch()
    lines = re.findall(r"^    (?:\$ )?hostdev ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    calls = [shlex.split(line.replace("\\\n", " "), comments=True) for line in lines]
    assert {name for name, *_ in calls} >= {"preprocess", "train", "predict", "serve", "report"}
    for name, *arguments in calls:
        commands.find(name).parser().parse_args(arguments)
