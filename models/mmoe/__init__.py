"""MMoE (Ma et al., KDD 2018): several labels from experts that are mixed for each."""

from hostdev.models.mmoe.network import MMoE

__all__ = ["MMoE"]
