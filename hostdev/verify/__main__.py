"""python -m hostdev.verify"""

if __name__ == "__main__":  # first of all, as the imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.verify.__main__"))

from hostdev.verify import main

__all__ = ["main"]
