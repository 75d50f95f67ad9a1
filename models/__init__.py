"""Models for `hostdev.train --model`, by name, or others as package.module:Class; imported as hostdev.models."""

from hostdev.models.registry import NAMES, default_dim, find, make

__all__ = ["NAMES", "default_dim", "find", "make"]
