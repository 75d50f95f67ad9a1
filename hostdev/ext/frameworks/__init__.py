"""Support for the gradient state of Hugging Face accelerate, and for the checkpoints of Lightning."""

from hostdev.ext.frameworks import accelerate, lightning

__all__ = ["accelerate", "lightning"]
