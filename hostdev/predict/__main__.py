"""python -m hostdev.predict: probabilities for the rows of a file or of a data set."""

if __name__ == "__main__":  # before the imports, which take seconds, so that Ctrl-C ends them with one line, too
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.commands.predict", "hostdev.predict"))
