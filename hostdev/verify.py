"""python -m hostdev.verify: train a few steps in every mode on the user's data, and compare each step bit by bit."""

if __name__ == "__main__":  # `run_module` does the slow imports, so that Ctrl-C during an import prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.verify.cli", "hostdev.verify"))
