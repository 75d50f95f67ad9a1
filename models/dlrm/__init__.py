"""DLRM (Naumov et al., 2019)."""

from hostdev.models.dlrm.network import DLRM

__all__ = ["DLRM"]
