"""python -m hostdev.checkpoint: show, verify, compare, merge and export checkpoints."""

if __name__ == "__main__":  # before the slow imports, so that Ctrl-C during an import also prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.checkpoints.cli", "hostdev.checkpoint"))
