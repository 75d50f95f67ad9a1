"""What a table can do: the only questions that code outside of a table asks about its kind."""

from typing import NamedTuple


class Capabilities(NamedTuple):
    """The properties of a table that decide how other code uses it."""

    by_key: bool = False  # ids are keys, any integers of 64 bits, which get rows and lose them
    on_disk: bool = False  # rows may be on disk: tasks need rows that are pinned in memory
    late: bool = False  # rows miss the steps that do not use them, and get them when they are next read or updated
    formats: tuple[int, ...] | None = None  # how each plane of a row is stored; None if all are float32
    ranks: int = 1  # number of ranks that each have a part of the rows

    @property
    def in_place(self) -> bool:
        """Whether the memory of the rows has their values after the last step, in float32."""
        return not (self.on_disk or self.late or self.formats)
