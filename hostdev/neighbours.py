"""python -m hostdev.neighbours: print the rows of an embedding table that are nearest to one of them."""

if __name__ == "__main__":  # `run_module` does the slow imports, so that Ctrl-C during an import prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.neighbours.cli", "hostdev.neighbours"))
