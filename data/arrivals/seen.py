"""Which files have been taken: as little as it takes to notice late and repeated ones, however long a run lasts."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.data.arrivals.folder import hash_of, key_of

MOST_DIGESTS = 1000  # of the last files, by which a repeated one is found
_MOST_NEW = 1024  # in a set, which takes several times the space of an array


class Seen:
    """The files of a folder that were taken or set aside.

    Kept are the name that sorts last among the files taken, 64 bits for each file that was taken or set aside and is
    still in the folder, and the names and contents' digests of the last 1,000 files taken.
    """

    def __init__(self) -> None:
        self.last: str | None = None
        self.taken = 0
        self._known: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._new: set[int] = set()  # not in `_known` yet
        self._digests: OrderedDict[str, str] = OrderedDict()  # names by digest

    @property
    def size(self) -> int:
        """The number of files of which 64 bits are kept."""
        return len(self._known) + len(self._new)

    def is_known(self, name: str) -> bool:
        """Return whether a file was taken or set aside."""
        number, new, known = hash_of(name), self._new, self._known  # in this order: another thread may move numbers
        place = int(np.searchsorted(known, np.uint64(number)))
        return number in new or (place < len(known) and int(known[place]) == number)

    def is_late(self, name: str) -> bool:
        """Return whether an unknown file sorts before one that was taken."""
        return self.last is not None and key_of(name) <= key_of(self.last)

    def find_same(self, digest: str) -> str | None:
        """Return the name of one of the last files taken that has this content, or None."""
        return self._digests.get(digest)

    def take(self, name: str, digest: str) -> None:
        """Record that a file was taken."""
        self._add(name)
        if not self.is_late(name):
            self.last = name
        self.taken += 1
        self._digests[digest] = name
        if len(self._digests) > MOST_DIGESTS:
            self._digests.popitem(last=False)

    def set_aside(self, name: str) -> None:
        """Record that a file was set aside."""
        self._add(name)

    def _add(self, name: str) -> None:
        self._new.add(hash_of(name))
        if len(self._new) > _MOST_NEW:
            self._known, self._new = self._all(), set()

    def _all(self) -> npt.NDArray[np.uint64]:
        """Return the numbers of all files, sorted."""
        return np.union1d(self._known, np.array(sorted(self._new), np.uint64))

    def keep(self, names: Iterable[str]) -> None:
        """Forget the files that are not among `names`, those that are in the folder."""
        there = np.array(sorted(map(hash_of, names)), np.uint64)
        self._known = np.intersect1d(there, self._all())
        self._new = set()

    def as_values(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {
            "last": self.last,
            "taken": self.taken,
            "known": self._all().view(np.int64),
            "digests": np.frombuffer(bytes.fromhex("".join(self._digests)), np.uint8),
            "names": np.frombuffer("\0".join(self._digests.values()).encode(errors="surrogateescape"), np.uint8),
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Seen":
        """Return what `as_values` converted to these values."""
        made = cls()
        made.last, made.taken = values["last"], values["taken"]
        made._known = np.ascontiguousarray(values["known"], np.int64).view(np.uint64)
        digests = values["digests"].tobytes().hex()
        names = values["names"].tobytes().decode(errors="surrogateescape").split("\0")
        for i in range(len(digests) // 64):
            made._digests[digests[64 * i : 64 * i + 64]] = names[i]
        return made
