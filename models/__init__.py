"""Models for `hostdev.train --model`: these by name, others as package.module:Class; imported as hostdev.models."""

from hostdev.models.registry import NAMES, find, make

__all__ = ["NAMES", "find", "make"]
