"""DCN-v2 (Wang et al., WWW 2021)."""

from hostdev.models.dcn.network import DCN

__all__ = ["DCN"]
