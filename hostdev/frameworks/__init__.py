"""Support for frameworks: accelerate's state of the body's batch, and Lightning's checkpoints."""

from hostdev.frameworks import accelerate, lightning

__all__ = ["accelerate", "lightning"]
