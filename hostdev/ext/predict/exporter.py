"""The export of the dense layers as a network in ONNX."""

import argparse
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hostdev.core.errors import UserError
from hostdev.ext.checkpoints.exporter import Exporter
from hostdev.ext.predict.cli import add_model

if TYPE_CHECKING:
    from hostdev.checkpoint.folder import Chain


class Onnx(Exporter):
    """The dense layers as a network in ONNX."""

    options = ("model",)

    def add_options(self, to: argparse.ArgumentParser) -> None:
        """See `Exporter`."""
        add_model(to)

    def check(self, arguments: argparse.Namespace) -> None:
        """Raise UserError unless the packages are installed."""
        for package in ("onnx", "onnxscript", "onnxruntime"):
            try:
                import_module(package)
            except ModuleNotFoundError as error:
                raise UserError(
                    f"--format onnx needs ONNX, and {error.name} is not installed; pip install 'hostdev[onnx]'"
                ) from None

    def write(self, chain: "Chain", out: Path, arguments: argparse.Namespace) -> list[str]:
        """See `Exporter`."""
        from hostdev.ext.predict.onnx_export import write

        return write(arguments.model, chain, out)
