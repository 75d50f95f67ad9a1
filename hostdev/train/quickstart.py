"""python -m hostdev.train.quickstart: from raw Criteo text, or synthetic text, to a trained model in one command."""

if __name__ == "__main__":
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.training.quickstart_cli", "hostdev.train.quickstart"))
