"""python -m hostdev.predict: probabilities for the rows of a file or of a data set."""

if __name__ == "__main__":  # first of all, as imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.commands.predict", "hostdev.predict"))
