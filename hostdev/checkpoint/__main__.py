"""python -m hostdev.checkpoint: show, verify, compare, merge and export checkpoints."""

if __name__ == "__main__":  # before the imports, which take seconds, so that Ctrl-C ends them with one line, too
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.commands.checkpoint", "hostdev.checkpoint"))
