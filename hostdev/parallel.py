"""Networks in parts (experimental): the public names of `hostdev.ext.parallel`."""

from hostdev.ext import parallel as _extension

__all__ = _extension.__all__
__getattr__, __dir__ = _extension.__getattr__, _extension.__dir__
