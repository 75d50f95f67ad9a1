"""Support for Hugging Face accelerate's gradient state, and for Lightning's checkpoints."""

from hostdev.frameworks import accelerate, lightning

__all__ = ["accelerate", "lightning"]
