"""MMoE (Ma et al., KDD 2018): predicts several labels from experts that are mixed differently for each label."""

from hostdev.models.mmoe.network import MMoE

__all__ = ["MMoE"]
