"""Every test of the loop ends with no thread left."""

import pytest

from tests.runtime.cases import threads


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert threads() == set()
