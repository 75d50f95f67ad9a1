"""Checks for classes of your own: the public names of `hostdev.ext.testing`."""

from hostdev.ext import testing as _extension

__all__ = _extension.__all__
__getattr__, __dir__ = _extension.__getattr__, _extension.__dir__
