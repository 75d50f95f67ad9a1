"""Errors that the user can mend: one line that says what, where and what to do."""


class UserError(ValueError):
    """Wrong input or options; commands print it as one line and exit with code 2."""
