"""Checks that each test leaves no thread of a loop running."""

import gc

import pytest

from tests.runtime.cases import threads


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()  # a trainer, which holds its loaders, is in cycles of references
    assert threads() == set()
