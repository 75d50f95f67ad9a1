"""The classes of hostdev's own errors. `UserError`, which is raised for wrong input, is a subclass of ValueError."""

from hostdev.core.errors import HostdevError, NonFiniteError, RankError, TableFullError, TransientError, UserError

__all__ = ["HostdevError", "NonFiniteError", "RankError", "TableFullError", "TransientError", "UserError"]
