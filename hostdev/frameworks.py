"""Support for frameworks: the public names of `hostdev.ext.frameworks`."""

from hostdev.ext.frameworks import accelerate, lightning

__all__ = ["accelerate", "lightning"]
