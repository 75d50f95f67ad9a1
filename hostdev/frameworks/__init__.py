"""Plugins for other frameworks."""

from hostdev.frameworks import lightning

__all__ = ["lightning"]
