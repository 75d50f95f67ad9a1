"""python -m hostdev.data.preprocess: the same commands as `hostdev preprocess`."""

if __name__ == "__main__":
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.data.preprocess.cli", "hostdev.data.preprocess"))
