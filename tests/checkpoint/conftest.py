"""Fixtures that run commands in this process."""

import pytest

from hostdev.core import cli
from hostdev.ext.training import cli as train


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Run the command in this process, in an empty folder; return its exit code and output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return cli.run(train.PROG, train.main, list(map(str, arguments))), *capsys.readouterr()

    return run
