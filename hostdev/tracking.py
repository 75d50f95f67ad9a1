"""Callbacks and trackers: the public names of `hostdev.ext.tracking`."""

from hostdev.ext import tracking as _extension

__all__ = _extension.__all__
__getattr__, __dir__ = _extension.__getattr__, _extension.__dir__
