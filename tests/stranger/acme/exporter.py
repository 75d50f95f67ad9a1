"""An export of the sizes of tables as text."""

from hostdev import Exporter


class Text(Exporter):
    """One line per table."""

    options = ("upper",)

    def add_options(self, to):
        """Add an option."""
        to.add_argument("--upper", action="store_true", help="with text: in capitals")

    def write(self, chain, out, arguments):
        """See `Exporter`."""
        text = "".join(f"{table.name} {table.rows} {table.dim}\n" for table in chain[-1].manifest.tables)
        (out / "tables.txt").write_text(text.upper() if arguments.upper else text)
        return [f"{len(chain[-1].manifest.tables)} tables"]
