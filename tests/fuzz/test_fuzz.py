"""Changed files and inputs are read, or refused in one line; `make test-slow` tries 20,000 changes of each kind."""

from importlib import import_module

import pytest

from tests.fuzz.harness import fuzz

TARGETS = {
    "checkpoints": 100,
    "datasets": 100,
    "journals": 100,
    "predictor": 100,
    "segments": 60,
    "tables": 100,
}  # 2 to 15 s each
MANY = 20_000
SEED = 2026


@pytest.mark.parametrize(
    ("name", "cases"), [*TARGETS.items(), *(pytest.param(name, MANY, marks=pytest.mark.slow) for name in TARGETS)]
)
def test_changed_content(tmp_path, name, cases):
    base = tmp_path / "base"
    base.mkdir()
    import_module(f"tests.fuzz.{name}").make(base)
    failed = fuzz(name, base, tmp_path / "work", seed=SEED, cases=cases)
    assert not failed, f"{len(failed)} of {cases}:\n" + "\n".join(failed[:20])
