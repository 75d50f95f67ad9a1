"""Remembers the files taken so far, in little memory, so that late, repeated and changed files are noticed.

A change is recognized by size, identity and content, not only by the name.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.checksums import hash_stream
from hostdev.core.errors import StoppedError, in_words
from hostdev.core.run_files import GROWN, REPLACED
from hostdev.data.preprocess import places
from hostdev.ext.streams.folder import FileState, Folder, ends_line, hash_of, key_of

MOST_DIGESTS = 1000  # number of last files taken whose digests are kept, by which repeated files are found
_MOST_NEW = 1024  # limit of a dict's entries; more are moved to arrays, which take a fraction of the space
UNSETTLED, SAME = "unsettled", "same"


class Taken(NamedTuple):
    """What is known of a file that was taken or set aside; each value fits into int64.

    Attributes:
        size: Number of bytes that were taken or examined; -1 if it is unknown.
        stamp: The file's `FileState.stamp` when it was taken or set aside.
        digest: 63 bits of the SHA-256 of the first `size` bytes; 0 if it is unknown or does not matter.
        lines: Number of rows in the first `size` bytes, with rejected rows.
    """

    size: int = -1
    stamp: int = 0
    digest: int = 0
    lines: int = 0


UNKNOWN = Taken()


def digest_bits(sha256: str | None) -> int:
    """Return 63 bits of a SHA-256 in hexadecimal digits; 0 for None."""
    return 0 if sha256 is None else int(sha256[:16], 16) >> 1


class Seen:
    """The files of a folder that were taken or set aside.

    It keeps the name that sorts last among the files taken, 40 bytes for each file that was taken or set aside and is
    still in the folder, and the names and content digests of the last 1,000 files taken.
    """

    def __init__(self) -> None:
        self.last: str | None = None
        self.taken = 0
        self._known = np.zeros(0, np.uint64), np.zeros((0, 4), np.int64)  # sorted hashes of names, and their `Taken`
        self._new: dict[int, Taken] = {}  # by hash of name: entries that `_known` lacks, or that replace it
        self._digests: OrderedDict[str, str] = OrderedDict()  # names by digest

    @property
    def size(self) -> int:
        """An upper bound of the number of files that are remembered."""
        return len(self._known[0]) + len(self._new)

    def is_known(self, name: str) -> bool:
        """Return whether a file was taken or set aside."""
        return self.get(name) is not None

    def get(self, name: str) -> Taken | None:
        """Return what is known of a file that was taken or set aside; None if it was not."""
        number, new, known = hash_of(name), self._new, self._known  # read `_new` first: `note` may move its entries
        if (found := new.get(number)) is not None:
            return found
        numbers, values = known
        place = int(np.searchsorted(numbers, np.uint64(number)))
        if place < len(numbers) and int(numbers[place]) == number:
            return Taken(*values[place].tolist())
        return None

    def is_late(self, name: str) -> bool:
        """Return whether an unknown file is late: whether it sorts before the last file taken, or has its sort key."""
        return self.last is not None and key_of(name) <= key_of(self.last)

    def find_same(self, digest: str) -> str | None:
        """Return the name of one of the last files taken that has this content, or None."""
        return self._digests.get(digest)

    def take(self, name: str, digest: str, taken: Taken = UNKNOWN) -> None:
        """Record that a file was taken, or more of the file that was taken last."""
        self.note(name, taken)
        if not self.is_late(name):
            self.last = name
        self.taken += 1
        self._digests[digest] = name
        if len(self._digests) > MOST_DIGESTS:
            self._digests.popitem(last=False)

    def note(self, name: str, taken: Taken = UNKNOWN) -> None:
        """Record what is known of a file, such as one that was set aside."""
        self._new[hash_of(name)] = taken
        if len(self._new) > _MOST_NEW:
            self._known, self._new = self._all(), {}

    def _all(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return the hashes of all names, sorted, and the `Taken` of each."""
        numbers = np.array(list(self._new), np.uint64)
        values = np.array(list(self._new.values()), np.int64).reshape(-1, 4)
        older = ~np.isin(self._known[0], numbers)
        numbers = np.concatenate([self._known[0][older], numbers])
        order = np.argsort(numbers)
        return numbers[order], np.concatenate([self._known[1][older], values])[order]

    def keep(self, names: Iterable[str]) -> None:
        """Forget the files that are not among `names`, the names in the folder."""
        there = np.array(sorted(map(hash_of, names)), np.uint64)
        numbers, values = self._all()
        kept = np.isin(numbers, there)
        self._known, self._new = (numbers[kept], values[kept]), {}

    def as_values(self) -> dict[str, Any]:
        """Return the content as values for a checkpoint."""
        numbers, values = self._all()
        return {
            "last": self.last,
            "taken": self.taken,
            "known": numbers.view(np.int64),
            "of_each": values,
            "digests": np.frombuffer(bytes.fromhex("".join(self._digests)), np.uint8),
            "names": np.frombuffer("\0".join(self._digests.values()).encode(errors="surrogateescape"), np.uint8),
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Seen":
        """Return the object that `as_values` converted to these values."""
        made = cls()
        made.last, made.taken = values["last"], values["taken"]
        numbers = np.ascontiguousarray(values["known"], np.int64).view(np.uint64)
        made._known = numbers, np.ascontiguousarray(values["of_each"], np.int64)
        digests = values["digests"].tobytes().hex()
        names = values["names"].tobytes().decode(errors="surrogateescape").split("\0")
        for i in range(len(digests) // 64):
            made._digests[digests[64 * i : 64 * i + 64]] = names[i]
        return made


class Change(NamedTuple):
    """A change of a known file.

    Attributes:
        kind: UNSETTLED while it is written to or cannot be read, SAME if its content is the same, GROWN if bytes were
            added, REPLACED if bytes that were taken have changed.
        state: The file's state now.
        taken: What was known of the file.
        about: The change in words.
    """

    kind: str
    state: FileState
    taken: Taken
    about: str = ""


def examine(folder: Folder, name: str, taken: Taken, state: FileState, stop: Event) -> Change:
    """Return how a file differs from what was taken of it; UNSETTLED if it cannot be read now."""
    try:
        change = _examine(folder, name, taken, state, stop)
        return change if folder.state(name) == state else Change(UNSETTLED, state, taken)
    except StoppedError:
        return Change(UNSETTLED, state, taken)
    except OSError as error:
        return Change(UNSETTLED, state, taken, in_words(error))


def _examine(folder: Folder, name: str, taken: Taken, state: FileState, stop: Event) -> Change:
    if state.size < taken.size:
        about = f"it has become shorter: {taken.size:,} bytes were taken, and {state.size:,} are left"
        return Change(REPLACED, state, taken, about)
    if not taken.digest:  # nothing was taken, or the content does not matter
        return Change(SAME, state, taken)
    path = folder.open(name)
    with places.open_bytes(path, buffered=False) as file:
        digest = hash_stream(file, most=taken.size, stop=stop)
    if digest_bits(digest) != taken.digest:
        return Change(REPLACED, state, taken, "it was replaced, or its first bytes were changed")
    if state.size == taken.size:
        return Change(SAME, state, taken)
    cut = "" if not taken.lines or ends_line(path, taken.size) else f", in the middle of row {taken.lines:,}"
    return Change(GROWN, state, taken, f"{state.size - taken.size:,} bytes were added{cut}")
