"""Parses the JSON of requests strictly, with a `RefusedError` for each error, and writes the JSON of answers.

Python's parser never releases the GIL. A large text is therefore scanned first, by a kernel that releases the GIL, and
then parsed in pieces, between which other threads run.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hostdev.ext.serving import json_structure
from hostdev.ext.serving.refused import RefusedError, bad, too_large

PIECE_BYTES = 1 << 16  # bytes that are parsed at a time, in a few milliseconds
_PIECE_VALUES = 4096  # number of values of an answer that are written at a time
_SPACES = b" \t\n\r"
_MOST_DEPTH = 256  # the deepest nesting of a text above PIECE_BYTES; deeper ones are refused
# The most bytes that Python needs for an object of one entry, for an array, for a text without its characters (each
# with the reference in its container), and for each character of a number.
_OBJECT_BYTES, _ARRAY_BYTES, _TEXT_BYTES, _NUMBER_BYTES = 240, 96, 96, 12


class Structure(NamedTuple):
    """What a JSON text consists of, before it is parsed.

    Attributes:
        containers: The number of objects and arrays.
        memory: Bytes that the parsed values need, at most.
        cuts: For each large container, by the position of its opening bracket: the positions of the commas that divide
            it into pieces, and of its closing bracket.
        starts: The keys of `cuts` in order.
    """

    containers: int
    memory: int
    cuts: dict[int, list[int]]
    starts: list[int]

    def require(self, most_containers: int) -> None:
        """Raise RefusedError if there are too many containers."""
        if self.containers > most_containers:
            raise too_large(
                f"the body has {self.containers:,} JSON objects and lists, more than {most_containers:,}; send its "
                "rows in several requests"
            )


def scan(content: bytes, what: str = "the body") -> Structure:
    """Return the structure of a JSON text; raise RefusedError if its brackets do not match, or are nested too deeply.

    The kernel releases the GIL.
    """
    cuts = np.empty((8 * (len(content) // PIECE_BYTES) + 1024, 2), np.int64)
    counts = np.zeros(json_structure.COUNTS, np.int64)
    levels, brackets = np.empty((_MOST_DEPTH, 3), np.int64), np.empty(_MOST_DEPTH, np.uint8)
    text = np.frombuffer(content, np.uint8)
    result, place, n = json_structure.scan(text, PIECE_BYTES, levels, brackets, cuts, counts)
    if result == json_structure.DEEP:
        raise _too_deep(what)
    if result != json_structure.WHOLE:
        message = "Unexpected bracket or comma" if result == json_structure.WRONG else "Unterminated value starting"
        raise _not_json(message, what, content, place)
    found: dict[int, list[int]] = defaultdict(list)
    for start, cut in cuts[:n].tolist():
        found[start].append(cut)
    objects, arrays, texts, text_bytes, others = counts.tolist()
    memory = _OBJECT_BYTES * objects + _ARRAY_BYTES * arrays + _TEXT_BYTES * texts + text_bytes + _NUMBER_BYTES * others
    return Structure(objects + arrays, memory, dict(found), sorted(found))


def parse_json(content: bytes, what: str = "the body", structure: Structure | None = None) -> Any:
    """Parse JSON in UTF-8.

    Args:
        content: The text.
        what: Its name in messages.
        structure: The result of `scan`, if that was called before.

    Raises:
        RefusedError: It is not JSON, has NaN or Infinity, a name twice in an object or an integer of thousands of
            digits, or is nested too deeply.
    """
    if structure is None and len(content) > PIECE_BYTES:
        structure = scan(content, what)
    if structure is None or not structure.starts:
        return _load(content, what, content, 0, 0)
    return _Pieces(content, what, structure).document()


class _Pieces:
    """Parses a text in pieces. The text around a large container is parsed with null in the container's place."""

    def __init__(self, content: bytes, what: str, structure: Structure) -> None:
        self._content, self._what = content, what
        self._cuts, self._starts = structure.cuts, structure.starts

    def document(self) -> Any:
        """Return the value of the whole text."""
        _, value = self._with_one_large(0, len(self._content), b"", b"")
        return value

    def _container(self, start: int) -> Any:
        """Return the large container at this position."""
        is_list = self._content[start] == ord("[")
        items: list[Any] = []
        entries: dict[str, Any] = {}
        edges = [start, *self._cuts[start]]
        for before, stop in pairwise(edges):
            group = self._group(before + 1, stop, is_list=is_list)
            if not group and len(edges) > 2:
                raise _not_json("Expecting value", self._what, self._content, before + 1)
            if is_list:
                items += group
            else:
                if not entries.keys().isdisjoint(group):
                    raise _twice(next(name for name in group if name in entries))
                entries.update(group)
        return items if is_list else entries

    def _group(self, start: int, stop: int, *, is_list: bool) -> Any:
        """Return a group of entries of a list or an object: several small entries, or a single one."""
        left, right = (b"[", b"]") if is_list else (b"{", b"}")
        found = bisect_left(self._starts, start)
        if found == len(self._starts) or self._starts[found] >= stop:
            return self._load(left + self._content[start:stop] + right, start, 1)
        shell, value = self._with_one_large(start, stop, left, right)
        return [value] if is_list else dict.fromkeys(shell, value)

    def _with_one_large(self, start: int, stop: int, left: bytes, right: bytes) -> tuple[Any, Any]:
        """Parse a text with one large container; return the text's value with null in its place, and the container."""
        inner = self._starts[bisect_left(self._starts, start)]
        rest = self._cuts[inner][-1] + 1
        if after := self._content[rest:stop].lstrip(_SPACES):
            raise _not_json("Expecting ',' delimiter", self._what, self._content, stop - len(after))
        shell = self._load(left + self._content[start:inner] + b"null" + right, start, len(left))
        return shell, self._container(inner)

    def _load(self, piece: bytes, start: int, added: int) -> Any:
        return _load(piece, self._what, self._content, start, added)


def _load(piece: bytes, what: str, content: bytes, start: int, added: int) -> Any:
    """Parse a piece: `added` bytes, and then the content from `start` on; errors give positions in the content."""
    try:
        return json.loads(piece.decode(), parse_constant=_reject, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise bad(f"{what} is not UTF-8, from byte {start + error.start - added + 1}") from None
    except json.JSONDecodeError as error:
        raise _not_json(error.msg, what, content, start, error.pos - added) from None
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError:  # Python's limit to the digits of an integer
        raise bad(f"{what} is not accepted: its JSON has an integer of thousands of digits") from None


def _not_json(message: str, what: str, content: bytes, start: int, characters: int = 0) -> RefusedError:
    """Return the error for a fault that is `characters` characters after the byte `start`."""
    before = content[:start].decode(errors="replace")
    after = content[start : start + 4 * max(0, characters)].decode(errors="replace")
    place = json.JSONDecodeError(message, before + after, len(before) + max(0, characters))
    return bad(f"{what} is not JSON: {message} at line {place.lineno}, column {place.colno}")


def _too_deep(what: str) -> RefusedError:
    return bad(f"{what} is not accepted: its JSON is nested too deeply")


def _reject(word: str) -> NoReturn:
    raise bad(f"{word} is not JSON; write null for a missing number")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _twice(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


def _twice(name: str) -> RefusedError:
    return bad(f"the name {name!r} occurs twice in one JSON object")


def is_unicode(texts: Sequence[str]) -> bool:
    """Return whether texts can be encoded as UTF-8; halves of surrogate pairs, which JSON can express, cannot."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def dump_list(values: list[Any]) -> bytes:
    """Return a list as JSON; it is written in pieces, between which other threads run."""
    parts = (dump(values[start : start + _PIECE_VALUES])[1:-1] for start in range(0, len(values), _PIECE_VALUES))
    return b"[" + b",".join(parts) + b"]"


def dump(content: Any) -> bytes:
    """Return a value as JSON without spaces."""
    return json.dumps(content, separators=(",", ":")).encode()
