"""The formats of exported tables: Parquet, .npy and safetensors."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hostdev.core.errors import UserError
from hostdev.ext.checkpoints.exporter import Exporter

if TYPE_CHECKING:
    from hostdev.checkpoint.folder import Chain

DTYPES = ("float32", "bfloat16")


class _Tables(Exporter):
    """Tables and dense layers as files for other programs."""

    options = ("slots", "dtype")
    format: ClassVar[str]

    def check(self, arguments: argparse.Namespace) -> None:
        """See `Exporter`."""
        if arguments.dtype not in (None, "float32") and self.format != "safetensors":
            raise UserError(
                f"--dtype {arguments.dtype}: {self.format} has no bfloat16; use --format safetensors, or omit --dtype"
            )

    def write(self, chain: "Chain", out: Path, arguments: argparse.Namespace) -> list[str]:
        """See `Exporter`."""
        from hostdev.ext.checkpoints.export import ExportOptions, export

        return export(chain, out, ExportOptions(self.format, arguments.slots, arguments.dtype or "float32"))


class Parquet(_Tables):
    """One Parquet file per table, with the column and value of the data set that each id stands for."""

    format = "parquet"

    def add_options(self, to: argparse.ArgumentParser) -> None:
        """Add the options of all three formats."""
        to.add_argument("--slots", action="store_true", help="also write optimizer state, steps, settings, and `extra`")
        to.add_argument("--dtype", choices=DTYPES, help="type of the tables' values (default float32)")


class Npy(_Tables):
    """One .npy file per column of a table."""

    format = "npy"


class Safetensors(_Tables):
    """One file of safetensors per table."""

    format = "safetensors"
