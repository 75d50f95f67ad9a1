"""python -m hostdev.data.preprocess table|criteo|synthetic: any table, Criteo text or a look-alike to Arrow shards.

And check|info: whether a data set is whole, and what is in it.
"""

if __name__ == "__main__":
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.commands.preprocess", "hostdev.data.preprocess"))
