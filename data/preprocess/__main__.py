"""python -m hostdev.data.preprocess table|criteo|synthetic|check|info: make, check or summarize Arrow shards."""

if __name__ == "__main__":
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.data.preprocess.cli", "hostdev.data.preprocess"))
