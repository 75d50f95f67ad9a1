"""python -m hostdev.launch: start the processes that a rank table assigns to this host, or check their connections."""

if __name__ == "__main__":  # `run_module` does the slow imports, so that Ctrl-C during an import prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.launch.cli", "hostdev.launch"))
