"""python -m hostdev.predict: write the predictions for the rows of a file or of a data set."""

if __name__ == "__main__":  # `run_module` does the slow imports, so that Ctrl-C during an import prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.predict.cli", "hostdev.predict"))
