"""DeepFM (Guo et al., IJCAI 2017)."""

from hostdev.models.deepfm.network import DeepFM

__all__ = ["DeepFM"]
