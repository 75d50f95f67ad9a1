"""Changed files and inputs are read, or refused in a line: 500 cases each, and 20,000 in `make test-slow`."""

from importlib import import_module

import pytest

from tests.fuzz.harness import fuzz

TARGETS = ["checkpoints", "datasets", "journals", "predictor", "tables"]
SEED = 2026


@pytest.mark.parametrize("cases", [500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_changed_content(tmp_path, name, cases):
    base = tmp_path / "base"
    base.mkdir()
    import_module(f"tests.fuzz.{name}").make(base)
    failed = fuzz(name, base, tmp_path / "work", seed=SEED, cases=cases)
    assert not failed, f"{len(failed)} of {cases}:\n" + "\n".join(failed[:20])
