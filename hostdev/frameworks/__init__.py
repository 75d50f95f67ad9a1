"""What other people's training loops need: accelerate's view of the batch in the body, Lightning's checkpoints."""

from hostdev.frameworks import accelerate, lightning

__all__ = ["accelerate", "lightning"]
