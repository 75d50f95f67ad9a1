"""Copies of new checkpoints to a store, in a thread that training never waits for."""

import contextlib
import secrets
import threading
from functools import partial
from pathlib import Path

from hostdev.checkpoint import folder, manifest
from hostdev.checkpoint.manifest import FILE_NAME, BrokenCheckpointError, Manifest, SegmentEntry
from hostdev.checkpoint.remote import IN_STORE, WRITER, begin_writing, remove_stored
from hostdev.core.errors import HostdevError, in_words
from hostdev.core.progress import bar
from hostdev.core.workers import call_all
from hostdev.stores.address import address_of
from hostdev.stores.store import Store, StoreError

_THREADS = 4
_POLL = 0.2  # seconds


class Uploads:
    """What a process that writes checkpoints brings to a store: the state of its folder.

    Checkpoints that the folder has no more are removed from the store, too. If uploads are slower than checkpoints are
    saved, those are left out that were removed meanwhile.

    Attributes:
        failure: Why the last upload failed; None if it did not.

    Args:
        path: The folder with the copies, which this process has locked.

    Raises:
        StoreError: The kind of store is unknown or not installed.
    """

    def __init__(self, path: Path) -> None:
        address = address_of(path)
        assert address is not None
        self.path, self.store = path, Store(address)
        self.failure: str | None = None
        self._there: set[str] = set()  # checkpoints that the store has
        self._token = b""
        self._changed = threading.Condition()
        self._asked = self._done = self._left = self._sent = 0
        self._thread: threading.Thread | None = None

    @classmethod
    def find(cls, path: Path) -> "Uploads | None":
        """Return the uploads of a folder, or None if it is on this machine only."""
        return None if address_of(path) is None else cls(path)

    def begin(self) -> None:
        """Copy what the store has, and let other writers know that this process writes there now.

        Raises:
            UserError: The store cannot be read or written.
        """
        begin_writing(self.store, self.path)
        there, here = self.store.read_if_there(WRITER), b""
        with contextlib.suppress(OSError):
            here = (self.path / WRITER).read_bytes()
        if not here or here != there:
            here = secrets.token_hex(16).encode()
            self.store.write(WRITER, here)
            (self.path / WRITER).write_bytes(here)
        self._token = here
        names = folder.names_in(self.path)
        self._there = {name for name in names if (self.path / name / IN_STORE).exists()}
        files = self.store.list()
        for name in {each.partition("/")[0] for each in files}:
            if folder.is_name(name) and f"{name}/{FILE_NAME}" not in files:
                remove_stored(self.store, name)  # what a killed upload has left
        if set(names) != self._there:
            self.notify()

    def notify(self) -> int:
        """Ask for the folder's state to be brought to the store; return a number for `wait`."""
        with self._changed:
            self._asked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hostdev-upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._asked

    def wait(self, number: int | None = None) -> None:
        """Wait until what was asked for has been uploaded or has failed: with `number`, or everything."""
        with self._changed:
            wanted = self._asked if number is None else number
            if self._done >= wanted:
                return
            total = max(1, self._left)
        seen = self._sent
        with bar(total, f"uploading to {self.store.shown}", "B", unit_scale=True) as shown:
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda: self._done >= wanted, _POLL):
                        return
                    sent = self._sent
                shown.update(min(sent, seen + total) - seen)
                total, seen = max(0, total - (sent - seen)), sent

    def is_done(self, number: int) -> bool:
        """Return whether an upload has ended, well or not."""
        return self._done >= number

    def require(self, number: int) -> None:
        """Wait for an upload; raise StoreError if it has failed."""
        self.wait(number)
        if self.failure is not None:
            raise StoreError(self.failure)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done)
                wanted = self._asked
            try:
                self._bring()
                failure = None
            except (HostdevError, OSError) as error:
                failure = f"{in_words(error)} (the checkpoint is in {self.path})"
            except BaseException as error:
                failure = f"{type(error).__name__}: {error}"
            with self._changed:
                self.failure, self._done = failure, wanted
                self._changed.notify_all()

    def _bring(self) -> None:
        names = folder.names_in(self.path)
        new: list[tuple[str, Manifest]] = []
        for name in names:
            if name not in self._there:
                with contextlib.suppress(BrokenCheckpointError):  # it was removed meanwhile
                    new.append((name, manifest.read(self.path / name)))
        self._left = sum(content.nbytes for _, content in new)
        for name, content in new:
            with contextlib.suppress(FileNotFoundError):
                self._upload(name, content)
                self._there.add(name)
                (self.path / name / IN_STORE).touch()
        names = folder.names_in(self.path)
        for name in sorted(self._there - set(names)):
            self._require_alone()
            remove_stored(self.store, name)
            self._there.discard(name)

    def _upload(self, name: str, content: Manifest) -> None:
        same = self._segments()

        def put(number: int) -> None:
            file = content.files[number]
            target = f"{name}/{file.file}"
            source = same.get((file.bytes, file.sha256)) if isinstance(file, SegmentEntry) else None
            if source is not None:
                self.store.copy(source, target)
            else:
                self.store.put(self.path / name / file.file, target)
            with self._changed:
                self._sent += file.bytes

        self.store.remove(f"{name}/{FILE_NAME}")  # of a damaged one
        for _ in call_all(_THREADS, "hostdev-upload", (partial(put, number) for number in range(len(content.files)))):
            pass
        self._require_alone()
        self.store.put(self.path / name / FILE_NAME, f"{name}/{FILE_NAME}")

    def _segments(self) -> dict[tuple[int, str], str]:
        """Return the segments that the store has, by size and checksum, with their names there."""
        found: dict[tuple[int, str], Path] = {}
        for name in self._there:
            with contextlib.suppress(HostdevError):
                found |= folder.segments_of(folder.Checkpoint(self.path / name, manifest.read(self.path / name)))
        return {key: path.relative_to(self.path).as_posix() for key, path in found.items()}

    def _require_alone(self) -> None:
        """Raise StoreError if another process writes to the store since this one has begun."""
        if self.store.read_if_there(WRITER) != self._token:
            raise StoreError(
                f"{self.store.shown} is in use: another process has begun to write checkpoints there; end one"
            )
