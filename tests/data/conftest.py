"""Fixtures of tables that are refused."""

import pytest

from hostdev.data.preprocess import cli as preprocess

GOOD = "y,x,c,g,t\n" + "".join(f"{i % 2},{i},v{i % 3},a|b,{i}\n" for i in range(20))


@pytest.fixture
def refused(tmp_path, in_process):
    """Run `preprocess table`, which must refuse; return its line."""

    def run(*arguments, label=("--label", "y"), columns=("--categorical", "c")):
        before = sorted(path.name for path in tmp_path.iterdir())
        code, out, error = in_process(preprocess, "table", *arguments, "--out", "out", *label, *columns)
        assert code == 2
        assert out == ""
        assert error.count("\n") == 1
        assert error.startswith("hostdev.data.preprocess: error: ")
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return error.removeprefix("hostdev.data.preprocess: error: ").strip()

    return run


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.csv"
    path.write_text(GOOD)
    return path
