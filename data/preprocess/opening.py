"""Opens a table's file in a given format."""

from collections.abc import Sequence

from hostdev.core.errors import UserError
from hostdev.data.preprocess.delimited import DelimitedFile
from hostdev.data.preprocess.files import ArrowTable, ParquetTable, TableFile
from hostdev.data.preprocess.inputs import AnyInput, InputFile
from hostdev.data.preprocess.sparse_text import SparseText, find_kind


def open_file(
    source: AnyInput,
    found: str,
    *,
    columns: Sequence[str] | None,
    delimiter: str | None,
    quotes: bool,
    encoding: str,
    skipped_lines: int,
) -> TableFile:
    """Open a file of format `found`, a result of `files.find_format`.

    The options are those of `DelimitedFile`. Sparse text is recognized only if all options have their defaults.
    Raises UserError for a broken file, and for a pipe unless the format is text.
    """
    if found == "text":
        is_told = columns is not None or delimiter is not None or skipped_lines or encoding != "utf-8" or not quotes
        if not is_told and (kind := find_kind(source)) is not None:
            return SparseText(source, kind)
        return DelimitedFile(
            source, columns=columns, delimiter=delimiter, quotes=quotes, encoding=encoding, skipped_lines=skipped_lines
        )
    if not isinstance(source, InputFile):
        raise UserError(f"{source.name}: {found} can be read only from a file, not from a pipe")
    return ParquetTable(source) if found == "Parquet" else ArrowTable(source, stream=found == "an Arrow stream")
