"""A plugin for the Trainer of Lightning."""

from hostdev.ext.frameworks.lightning import checkpoint_io

__all__ = ["checkpoint_io"]
