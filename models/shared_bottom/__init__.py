"""Shared bottom (Caruana, 1997): several labels from one network with a tower for each."""

from hostdev.models.shared_bottom.network import SharedBottom

__all__ = ["SharedBottom"]
