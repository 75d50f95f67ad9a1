"""Models for `hostdev.train --model`, by name or as package.module:Class. Import this package as hostdev.models."""

from hostdev.models.registry import NAMES, default_dim, find, make

__all__ = ["NAMES", "default_dim", "find", "make"]
