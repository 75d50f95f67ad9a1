"""The export of indexes of nearest rows for FAISS."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hostdev.ext.checkpoints.exporter import Exporter
from hostdev.ext.neighbours import INDEXES, METRICS
from hostdev.ext.neighbours.cli import add_rows

if TYPE_CHECKING:
    from hostdev.checkpoint.folder import Chain


class Faiss(Exporter):
    """An index of FAISS for each column's rows."""

    options = ("table", "column", "metric", "index")

    def add_options(self, to: argparse.ArgumentParser) -> None:
        """See `Exporter`."""
        add_rows(to, "default: all", "with faiss: ")
        to.add_argument(
            "--index", choices=INDEXES, help="with faiss: an exact or an approximate, faster search (default flat)"
        )

    def check(self, arguments: argparse.Namespace) -> None:
        """Raise UserError unless FAISS is installed."""
        from hostdev.ext.neighbours.faiss_export import import_faiss

        import_faiss()

    def write(self, chain: "Chain", out: Path, arguments: argparse.Namespace) -> list[str]:
        """See `Exporter`."""
        from hostdev.ext.neighbours.faiss_export import FaissOptions, write

        kind, metric = arguments.index or INDEXES[0], arguments.metric or METRICS[0]
        return write(FaissOptions(arguments.table, arguments.column, kind, metric), chain, out)
