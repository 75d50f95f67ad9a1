"""python -m hostdev.advise: recommend a cache size for the user's data by simulating every policy."""

if __name__ == "__main__":  # `run_module` does the slow imports, so that Ctrl-C during an import prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.advice.cli", "hostdev.advise"))
