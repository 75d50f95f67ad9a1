"""Changes of files that were taken or set aside: told by size, identity and content, and not by the name only."""

from hashlib import sha256
from threading import Event
from typing import NamedTuple

from hostdev.core.errors import in_words
from hostdev.core.run_files import GROWN, REPLACED
from hostdev.data.preprocess import places
from hostdev.ext.streams.arrivals.endings import ends_line
from hostdev.ext.streams.arrivals.folder import Folder, State
from hostdev.ext.streams.arrivals.seen import Taken, digest_bits

UNSETTLED, SAME = "unsettled", "same"
_AT_ONCE = 1 << 22  # bytes


class Change(NamedTuple):
    """What has become of a file: UNSETTLED while it is written to, SAME if only its time changed, or the change.

    Attributes:
        about: The change in words.
    """

    kind: str
    state: State
    taken: Taken
    about: str = ""


def examine(folder: Folder, name: str, taken: Taken, state: State, stop: Event) -> Change:
    """Return how a file differs from what was taken of it; UNSETTLED if it cannot be read now."""
    try:
        change = _examine(folder, name, taken, state, stop)
        return change if folder.state(name) == state else Change(UNSETTLED, state, taken)
    except OSError as error:
        return Change(UNSETTLED, state, taken, in_words(error))


def _examine(folder: Folder, name: str, taken: Taken, state: State, stop: Event) -> Change:
    if state.size < taken.size:
        about = f"it has become shorter: {taken.size:,} bytes were taken, and {state.size:,} are left"
        return Change(REPLACED, state, taken, about)
    if not taken.digest:  # nothing was taken of it, or more of it was told already
        return Change(SAME, state, taken)
    path, found, left = folder.open(name), sha256(), taken.size
    with places.open_bytes(path, buffered=False) as file:
        while left and (data := file.read(min(left, _AT_ONCE))):
            found.update(data)
            left -= len(data)
            if stop.is_set():
                return Change(UNSETTLED, state, taken)
    if digest_bits(found.hexdigest()) != taken.digest:
        return Change(REPLACED, state, taken, "it was replaced, or its first bytes were changed")
    if state.size == taken.size:
        return Change(SAME, state, taken)
    cut = "" if not taken.lines or ends_line(path, taken.size) else f", in the middle of row {taken.lines:,}"
    return Change(GROWN, state, taken, f"{state.size - taken.size:,} bytes were added{cut}")
