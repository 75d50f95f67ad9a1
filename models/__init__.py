"""Models for `hostdev.train --model`, by name or as package.module:Class. Import this package as hostdev.models."""

from hostdev.models.registry import default_dim, find, make, names

__all__ = ["default_dim", "find", "make", "names"]
