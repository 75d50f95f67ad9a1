"""The files of examples/ run and learn, and README shows how they differ, and what they are."""

import difflib
import runpy
import shutil

import numpy as np
import pytest

from hostdev.runtime import saving
from tests.conftest import ROOT

FILES = [ROOT / "examples" / name for name in ("movies_torch.py", "movies.py")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_learns(file, capsys):
    losses = runpy.run_path(str(file))["main"](steps=300)
    assert np.mean(losses[-50:]) < np.mean(losses[:50]) - 0.02
    assert "over 300 steps" in capsys.readouterr().out


def test_the_readme_shows_the_difference():
    one, other = ([line.rstrip() for line in file.read_text().split('"""', 2)[2].splitlines()] for file in FILES)
    changed = [line for line in difflib.ndiff(one, other) if line[0] in "+-"]
    shown = (ROOT / "README.md").read_text().split("```diff\n")[1].split("```")[0].splitlines()
    shown = [line for line in shown if line[:1] in ("+", "-")]
    assert sorted(line[0] + line[2:] for line in changed if line[2:]) == sorted(line for line in shown if line[1:])


def test_what_was_saved_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = ROOT / "examples" / "save_and_load.py"
    main = runpy.run_path(str(file))["main"]
    for steps in (60, 120):
        main(steps)
        saving._await_all()  # as the end of the program does
    shutil.rmtree("saved")
    main(120)
    first, then, gone_on, plain = capsys.readouterr().out.splitlines()
    assert first.startswith("step 60: loss 0.")
    assert then == "goes on after step 50"
    assert gone_on == plain
    shown = (ROOT / "README.md").read_text()
    assert file.read_text().partition("def main(steps):")[2].partition("\n\n\nif")[0] in shown
