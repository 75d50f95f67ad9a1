"""Other frameworks: what their programs use with hostdev."""

from hostdev.frameworks import lightning

__all__ = ["lightning"]
