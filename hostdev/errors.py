"""The classes of hostdev's own errors. `UserError`, for wrong input, is a ValueError."""

from hostdev.core.errors import HostdevError, NonFiniteError, RankError, TransientError, UserError

__all__ = ["HostdevError", "NonFiniteError", "RankError", "TransientError", "UserError"]
