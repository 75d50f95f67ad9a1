"""docs/guides/datasets.md: each command turns files of the published form into a data set, and a model trains on it."""

import re
import shlex

import pytest

from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.training import cli as train
from tests.conftest import ROOT
from tests.data import published

GUIDE = (ROOT / "docs/guides/datasets.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE))
OPTIONS = "--data data --batch-size 100 --epochs 1 --emb-dim 4 --device cpu --run-dir run"


def test_every_section_has_files():
    assert list(SECTIONS) == list(published.FILES)


@pytest.mark.drawn
@pytest.mark.parametrize("title", SECTIONS)
def test_from_files_to_a_model(title, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    published.FILES[title](tmp_path)
    for query in re.findall(r"```sql\n(.*?)```", SECTIONS[title], re.DOTALL):
        (tmp_path / "query.sql").write_text(query)
    [line] = re.findall(r"^    \$ hostdev preprocess (.*)$", SECTIONS[title], re.MULTILINE)
    assert cli.run(preprocess.PROG, preprocess.main, shlex.split(line)) == 0, capsys.readouterr().err
    found = manifest.read(tmp_path / "data")
    assert found.rows("train") >= 300
    assert found.rows("test") > 0
    assert 0.02 < found.statistics["label_mean"]["train"] < 0.98
    assert found.statistics["rejected"] == 0
    if title != "Criteo":  # whose values occur too rarely in so few rows
        assert all(space.values for space in found.schema.spaces)
    assert cli.run(train.PROG, train.main, OPTIONS.split()) == 0, capsys.readouterr().err
    assert "\nAUC " in capsys.readouterr().out
