"""python -m hostdev.checkpoint: show, verify, compare, merge and export checkpoints."""

if __name__ == "__main__":  # first of all, as imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.commands.checkpoint", "hostdev.checkpoint"))
