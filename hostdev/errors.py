"""The classes of hostdev's own errors. `UserError`, which is raised for wrong input, is a subclass of ValueError."""

from hostdev.core.errors import (
    DiskFullError,
    HostdevError,
    NonFiniteError,
    RankError,
    TableFullError,
    TransientError,
    UserError,
)

__all__ = [
    "DiskFullError",
    "HostdevError",
    "NonFiniteError",
    "RankError",
    "TableFullError",
    "TransientError",
    "UserError",
]
