"""Shared bottom (Caruana, 1997): predicts several labels with one network and a tower for each label."""

from hostdev.models.shared_bottom.network import SharedBottom

__all__ = ["SharedBottom"]
