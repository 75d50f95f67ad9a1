"""The command line of `launch`, which imports little as it is."""

from hostdev.launch import PROG, main

__all__ = ["PROG", "main"]
