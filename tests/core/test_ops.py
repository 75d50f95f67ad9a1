"""`hostdev.ops` contains the primitives that are public at the top."""

import hostdev
import hostdev.ops


def test_the_names_are_those_of_the_top():
    for name in hostdev.ops.__all__:
        assert getattr(hostdev.ops, name) is getattr(hostdev, name)
