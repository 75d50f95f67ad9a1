"""The planted mistakes of tests/mutations.py can still be planted; that they are noticed is seen by running it."""

import pytest

from tests.conftest import ROOT
from tests.mutations import MUTATIONS


@pytest.mark.parametrize("name", MUTATIONS)
def test_its_place_is_there(name):
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    for test in mutation.tests.split():
        assert (ROOT / test).exists()
