"""Changes of files that were taken or set aside: told by size, identity and content, and not by the name only."""

from threading import Event
from typing import NamedTuple

from hostdev.core.checksums import hash_stream
from hostdev.core.errors import StoppedError, in_words
from hostdev.core.run_files import GROWN, REPLACED
from hostdev.data.preprocess import places
from hostdev.ext.streams.arrivals.endings import ends_line
from hostdev.ext.streams.arrivals.folder import Folder, State
from hostdev.ext.streams.arrivals.seen import Taken, digest_bits

UNSETTLED, SAME = "unsettled", "same"


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
    except StoppedError:
        return Change(UNSETTLED, state, taken)
    except OSError as error:
        return Change(UNSETTLED, state, taken, in_words(error))


def _examine(folder: Folder, name: str, taken: Taken, state: State, stop: Event) -> Change:
    if state.size < taken.size:
        about = f"it has become shorter: {taken.size:,} bytes were taken, and {state.size:,} are left"
        return Change(REPLACED, state, taken, about)
    if not taken.digest:  # nothing was taken of it, or more of it was told already
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
