"""The errors that hostdev raises on purpose. Only wrong input is a ValueError."""

from hostdev.core.errors import HostdevError, NonFiniteError, RankError, UserError
from hostdev.core.errors import TransientError as TransientError

__all__ = ["HostdevError", "NonFiniteError", "RankError", "TransientError", "UserError"]
