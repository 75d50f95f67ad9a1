"""`hostdev.ops` has the primitives, and is imported without torch."""

import subprocess
import sys

import hostdev


def test_the_names():
    assert all(callable(getattr(hostdev.ops, name)) for name in hostdev.ops.__all__)
    assert hostdev.ops.__all__ == sorted(hostdev.ops.__all__)


def test_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, hostdev.ops; assert 'torch' not in sys.modules"], check=True)
