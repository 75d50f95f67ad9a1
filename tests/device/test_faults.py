"""Each wait that can be left out has tests that notice, in the quick rung on the simulated accelerator."""

import importlib.util
import json
import re
import sys

import pytest

from tests.conftest import ROOT
from tests.drawn import COVERED

TABLE = json.loads(COVERED.read_text())


def faults():
    """Return faults.py; an import by its package would register the simulated accelerator."""
    spec = importlib.util.spec_from_file_location("faults_alone", ROOT / "tests/standin/faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_wait_is_in_the_table():
    """`python -m tests.standin.covered` makes it again after a change of waits."""
    if not TABLE:
        pytest.skip("the table was not made yet; the rung has all tests")
    module = faults()
    waits = [fault for fault in module.find(ROOT, "hostdev") if fault.reason is None]
    assert len(waits) > 15
    assert list(TABLE) == module.names_of(waits)


@pytest.mark.parametrize("wait", TABLE)
def test_somebody_notices(wait):
    assert TABLE[wait]


def test_they_are_in_the_rung(device, request):
    if device.type != "standin":
        pytest.skip("on the simulated accelerator")
    collected = {item.nodeid for item in request.session.items}
    files = {test.partition("::")[0] for test in collected}
    listed = {test for tests in TABLE.values() for test in tests}
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("a part of the rung")
    assert {test for test in listed if test.partition("::")[0] in files} <= collected


def test_the_rung_collects_every_file_that_takes_a_device(request):
    """As the Makefile chooses them."""
    files = {item.path for item in request.session.items if "device" in item.fixturenames}
    missing = [path for path in files if not re.search(r"def [a-z_0-9]+\([^)\n]*\bdevice\b", path.read_text())]
    assert not missing
