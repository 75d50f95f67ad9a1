"""What `preprocess table` says of columns that are probably not what was meant."""

import numpy as np
import pytest

from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess


def test_values_that_are_unknown_or_apart_are_said(tmp_path, in_process):
    """Ids that test rows have and training rows have not; a column whose values are all rare; ids without a match."""
    rows = [f"{i % 2},u{i if i >= 900 else i % 30},r{i},{i % 40},{i % 40}.0" for i in range(1000)]
    (tmp_path / "t.csv").write_text("y,u,rare,a,b\n" + "\n".join(rows) + "\n")
    roles = ("--label", "y", "--categorical", "u,rare,a,b", "--share", "b=a", "--test-after", "a=35")
    code, printed, _ = in_process(preprocess, "table", tmp_path / "t.csv", "--out", tmp_path / "d", *roles)
    assert code == 0
    out = printed.splitlines()
    assert "rare: all values are out of vocabulary: each occurs too rarely (--threshold)" in out
    assert "a: 100.0% of the values in test rows are out of vocabulary, 0.0% in training rows" in out
    assert "b: none of its values occurs in the column whose ids it shares (--share); is the spelling the same?" in out
    assert not [line for line in out if line.startswith("u:")]
    found = manifest.read(tmp_path / "d").statistics["out_of_vocabulary_by_column"]
    assert found["train"]["rare"] == 1
    assert found["test"]["a"] == 1
    assert 0 < found["train"]["u"] < 0.2


@pytest.mark.parametrize(("dense", "told"), [("max", True), ("standard", True), ("log", False)])
def test_an_outlier_that_squeezes_a_column_is_said(tmp_path, in_process, dense, told):
    numbers = np.random.default_rng(0).normal(50, 10, 3000).round(2).tolist()
    for outlier in (50.0, 1e9):
        out = tmp_path / f"{outlier}"
        numbers[7] = outlier
        rows = [f"{i % 2},u{i % 30},{x}" for i, x in enumerate(numbers)]
        (tmp_path / "t.csv").write_text("y,u,x\n" + "\n".join(rows) + "\n")
        roles = ("--label", "y", "--categorical", "u", "--numeric", "x", "--dense", dense, "--test-fraction", 0)
        _, printed, _ = in_process(preprocess, "table", tmp_path / "t.csv", "--out", out, *roles)
        line = "x: a few numbers are so large that 99.9% of the others are nearly equal when scaled; use --dense log"
        assert (line in printed) == (told and outlier > 50), printed
