"""Checks that a class of your own keeps the promises that hostdev's own classes keep: `hostdev.testing`.

Each check raises AssertionError with what is wrong, and returns None otherwise.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
