"""python -m hostdev.train: train a model on shards, with the tables in host memory or on the device."""

if __name__ == "__main__":  # before the slow imports, so that Ctrl-C during an import also prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.training.cli", "hostdev.train"))
