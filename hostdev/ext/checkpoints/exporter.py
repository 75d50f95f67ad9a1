"""The base class of the formats of `checkpoint export`, and the steps that all formats share."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError

if TYPE_CHECKING:  # pyarrow and torch take seconds to import
    from hostdev.checkpoint.folder import Chain

KIND = "exporter"


class Exporter:
    """A format of `hostdev checkpoint export --format NAME`: subclass it, and register it as a `hostdev.exporter`.

    An object is created without arguments when the command line is parsed. Its module should therefore import little,
    and `check` and `write` should import the rest.

    Attributes:
        options: The names of all options that have an effect with the format: those that its `add_options` adds, and
            those of other formats that it also uses, such as "slots". The command rejects other formats' options.
    """

    options: ClassVar[tuple[str, ...]] = ()

    def add_options(self, to: argparse.ArgumentParser) -> None:
        """Add the format's own options, of which none may be required."""

    def check(self, arguments: argparse.Namespace) -> None:
        """Raise UserError if an option's value is wrong or a package is missing; called before anything is read."""

    def write(self, chain: "Chain", out: Path, arguments: argparse.Namespace) -> list[str]:
        """Write a checkpoint's files into an empty folder; return lines to print.

        Args:
            chain: The checkpoint, last, after its parents; all checksums are right. `hostdev.open(chain[-1].path)`
                returns its tables with their current rows.
            out: The folder, under a temporary name until this method has returned.
            arguments: The parsed options.
        """
        raise NotImplementedError


def export(exporter: Exporter, arguments: argparse.Namespace) -> int:
    """Export the newest valid checkpoint to a new folder; print its files and the exporter's lines; return 0.

    Raises:
        UserError: `arguments.out` exists, or an option is wrong.
        BrokenCheckpointError: A file is damaged; this is raised before anything is written.
        OSError: A file cannot be written.
    """
    from hostdev.checkpoint.loading import verify
    from hostdev.checkpoint.remote import newest
    from hostdev.core import outputs
    from hostdev.core.errors import naming
    from hostdev.core.memory import format_bytes
    from hostdev.core.progress import note
    from hostdev.core.sync import sending

    exporter.check(arguments)
    out: Path = arguments.out
    with sending(out):
        if os.path.lexists(out):
            raise outputs.taken_folder(out)
        found = newest(arguments.path)
        for line in found.notes():
            note(f"{arguments.prog}: {line}")
        verify(found.chain, segments=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with outputs.new_folder(out) as partial, naming(out):
            lines = exporter.write(found.chain, partial, arguments)
        files = [f"{shown_place(file)}: {format_bytes(file.stat().st_size)}" for file in sorted(out.iterdir())]
    print("\n".join(files + lines))
    return 0


def require_effect(name: str, arguments: argparse.Namespace, exporters: dict[str, Exporter]) -> None:
    """Raise UserError if an option was given that has no effect with the format `name`."""
    known = {option for exporter in exporters.values() for option in exporter.options}
    for option in sorted(known - set(exporters[name].options)):
        if getattr(arguments, option):
            formats = ", ".join(format for format, exporter in exporters.items() if option in exporter.options)
            raise UserError(
                f"--{option.replace('_', '-')} has no effect with --format {name}, only with {formats}; "
                f"leave out --{option.replace('_', '-')}"
            )
