"""Uploads of new checkpoints to a store, in a thread for which training steps do not wait."""

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hostdev.checkpoint import folder, manifest
from hostdev.checkpoint.folder import check_entry
from hostdev.checkpoint.manifest import FILE_NAME, BrokenCheckpointError, CheckpointManifest, File
from hostdev.checkpoint.remote import IN_STORE, WRITER, begin_writing, remove_stored
from hostdev.core.addresses import address_of
from hostdev.core.errors import HostdevError, StoreError, in_words
from hostdev.core.progress import bar, note
from hostdev.core.stores import About, Store
from hostdev.core.workers import Worker, call_all

_THREADS = 4
_POLL = 0.2  # seconds between updates of the progress bar

Key = tuple[int, str]  # a file's size and SHA-256


def send_checkpoint(
    checkpoint: folder.Checkpoint,
    store: Store,
    known: Mapping[Key, str],
    check: Callable[[File], object],
    require_alone: Callable[[], object],
    done: Callable[[File | None, About, int], object],
) -> None:
    """Copy a checkpoint to a store: remove a manifest of its name, copy all other files, and then copy its manifest.

    Args:
        checkpoint: The checkpoint.
        store: The store.
        known: Paths in the store by size and SHA-256; a file that is among these is copied within the store.
        check: Raises an error if a file of the checkpoint is damaged; called before it is sent.
        require_alone: Raises an error if another process writes to the store; called before the manifest is sent.
        done: Called with each file (None for the manifest), facts about its copy in the store, and the bytes sent
            (0 for the manifest).
    """
    path = checkpoint.path

    def put(file: File) -> tuple[About, int]:
        source, target = path / file.file, f"{path.name}/{file.file}"
        if (same := known.get((file.bytes, file.sha256))) is not None:
            store.copy(same, target)
            if (about := store.compare(target, source)) is not None:
                return about, 0
        check(file)
        return store.put(source, target), file.bytes

    manifest_name = f"{path.name}/{FILE_NAME}"
    store.remove(manifest_name)  # a damaged checkpoint of this name may have one
    files = checkpoint.manifest.files
    calls = (partial(put, file) for file in files)
    for file, (about, size) in zip(files, call_all(_THREADS, "hostdev-upload", calls), strict=True):
        done(file, about, size)
    require_alone()
    done(None, store.put(path / FILE_NAME, manifest_name), 0)


class Uploads:
    """The uploads of a process that writes checkpoints: they copy the checkpoints in its folder to a store.

    Checkpoints that the folder no longer has are removed from the store, too. If uploads are slower than checkpoints
    are saved, checkpoints that were removed meanwhile are not uploaded. A file's checksum is verified before the file
    is uploaded. Files that the store already has are compared with the folder's once, and again when the store reports
    that they have changed; damaged ones are replaced.

    Attributes:
        failure: Why the last upload failed; None if it did not.
        count: Number of checkpoints that were uploaded.
        failures: Number of attempts that failed.

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
        self.count = self.failures = 0
        self._compared: dict[str, About] = {}  # by path in the store: facts about files when they were found intact
        self._there: set[str] = set()  # names of the checkpoints that the store has
        self._token = b""
        self._counting = threading.Lock()
        self._left = self._sent = 0  # bytes to upload, bytes uploaded
        self._worker = Worker("hostdev-upload", self._try_upload)

    @classmethod
    def find(cls, path: Path) -> "Uploads | None":
        """Return the uploads of a folder, or None if it is on this machine only."""
        return None if address_of(path) is None else cls(path)

    def begin(self) -> None:
        """Copy the store's checkpoints to the folder, and announce this process to other writers.

        Leftovers of killed uploads are removed from the store, and checkpoints that it lacks are uploaded.

        Raises:
            UserError: The store cannot be read or written.
        """
        begin_writing(self.store, self.path)
        stored_token, token = self.store.read_if_there(WRITER), b""
        with contextlib.suppress(OSError):
            token = (self.path / WRITER).read_bytes()
        if not token or token != stored_token:
            token = secrets.token_hex(16).encode()
            self.store.write(WRITER, token)
            (self.path / WRITER).write_bytes(token)
        self._token = token
        names = folder.names_in(self.path)
        self._there = {name for name in names if (self.path / name / IN_STORE).exists()}
        files = self.store.list()
        for name in {file.partition("/")[0] for file in files}:
            if folder.is_name(name) and f"{name}/{FILE_NAME}" not in files:
                remove_stored(self.store, name)  # left behind by a killed upload
        if set(names) != self._there:
            self.notify()

    def notify(self) -> int:
        """Request an upload of the folder's checkpoints; return the request's number, for `wait`."""
        return self._worker.ask()

    def wait(self, number: int | None = None) -> None:
        """Wait until the request `number`, or every request if it is None, has ended with an upload or a failure."""
        wanted = self._worker.asked if number is None else number
        if self.is_done(wanted):
            return
        total, seen = max(1, self._left), self._sent
        with bar(total, f"uploading to {self.store.shown}", "B", unit_scale=True) as shown:
            while not self._worker.wait(wanted, _POLL):
                sent = self._sent
                shown.update(min(sent, seen + total) - seen)
                total, seen = max(0, total - (sent - seen)), sent

    def is_done(self, number: int) -> bool:
        """Return whether the request `number` has ended, with an upload or a failure."""
        return self._worker.ended >= number

    def require(self, number: int) -> None:
        """Wait until the request `number` has ended; raise StoreError if the last upload has failed."""
        self.wait(number)
        if self.failure is not None:
            raise StoreError(self.failure)

    def _try_upload(self) -> None:
        try:
            self._bring()
            failure = None
        except (HostdevError, OSError) as error:
            failure = f"{in_words(error)} (the checkpoint is in {self.path})"
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
        self.failure = failure
        self.failures += failure is not None

    def _bring(self) -> None:
        names = folder.names_in(self.path)
        new_checkpoints: list[tuple[str, CheckpointManifest]] = []
        for name in names:
            if name not in self._there:
                with contextlib.suppress(BrokenCheckpointError):  # its folder was removed meanwhile
                    new_checkpoints.append((name, manifest.read(self.path / name)))
        self._left = sum(content.nbytes for _, content in new_checkpoints)
        if new_checkpoints:
            self._mend(names, {content.parent.name for _, content in new_checkpoints if content.parent is not None})
        damage: BrokenCheckpointError | None = None
        for name, content in new_checkpoints:
            try:
                self._upload(name, content)
                self._there.add(name)
                self.count += 1
                (self.path / name / IN_STORE).touch()
            except FileNotFoundError:
                continue
            except BrokenCheckpointError as error:
                damage = damage or error
        if damage is not None:
            raise damage  # before older checkpoints are removed from the store
        names = folder.names_in(self.path)
        for name in sorted(self._there - set(names)):
            self._require_alone()
            remove_stored(self.store, name)
            self._there.discard(name)

    def _upload(self, name: str, content: CheckpointManifest) -> None:
        if content.parent is not None and content.parent.name not in self._there:
            raise BrokenCheckpointError(f"{name} builds on {content.parent.name}, which is not in {self.store.shown}")

        def note_sent(file: File | None, about: About, copied: int) -> None:
            self._compared[f"{name}/{FILE_NAME if file is None else file.file}"] = about
            with self._counting:
                self._sent += 0 if file is None else file.bytes

        send_checkpoint(
            folder.Checkpoint(self.path / name, content),
            self.store,
            self._segments(),
            lambda file: self._check(name, file, content),
            self._require_alone,
            note_sent,
        )

    def _check(self, name: str, file: File, content: CheckpointManifest) -> None:
        """Raise BrokenCheckpointError for a damaged file in the folder; FileNotFoundError if its checkpoint is gone."""
        try:
            check_entry(self.path / name, file, content.segment_states)
        except BrokenCheckpointError:
            if not (self.path / name).is_dir():
                raise FileNotFoundError from None
            raise

    def _mend(self, names: Sequence[str], parents: set[str]) -> None:
        """Compare the files of checkpoints in the store with the folder's, and replace damaged ones in the store.

        Args:
            names: The checkpoints in the folder.
            parents: The checkpoints that new ones build on.

        Raises:
            BrokenCheckpointError: A file that new checkpoints build on is damaged in the folder.
            StoreError: Another process writes to the store, or the store cannot be reached.
        """
        stored = self.store.list()
        self._compared = {name: about for name, about in self._compared.items() if name.partition("/")[0] in names}

        def look(name: str, file: str, check: Callable[[], object]) -> None:
            target, source = f"{name}/{file}", self.path / name / file
            known, about = self._compared.get(target), stored.get(target)
            if known is not None and about is not None and (known.size, known.version) == (about.size, about.version):
                return
            with contextlib.suppress(FileNotFoundError):
                try:
                    check()
                except BrokenCheckpointError as error:
                    if name in needed:
                        raise
                    note(f"warning: {error}; it cannot be compared with the one in {self.store.shown}")
                    return
                if (same := self.store.compare(target, source)) is None:
                    self._require_alone()  # if another process writes to the store, the file may be its own
                    note(f"{self.store.shown}/{target} is damaged; it is replaced from {source}")
                    same = self.store.put(source, target)
                self._compared[target] = same

        contents: dict[str, CheckpointManifest] = {}
        for name in names:
            with contextlib.suppress(BrokenCheckpointError):  # its folder was removed meanwhile
                contents[name] = manifest.read(self.path / name)
        needed = set(parents)
        while further := {parent.name for name in needed & set(contents) if (parent := contents[name].parent)} - needed:
            needed |= further
        calls: list[Callable[[], None]] = []
        for name in self._there & set(contents):
            content = contents[name]
            calls += [
                partial(look, name, file.file, partial(self._check, name, file, content)) for file in content.files
            ]
            calls.append(partial(look, name, FILE_NAME, lambda: None))
        for _ in call_all(_THREADS, "hostdev-compare", calls):
            pass

    def _segments(self) -> dict[tuple[int, str], str]:
        """Return the paths in the store of the segments that it has, by size and checksum."""
        segments: dict[tuple[int, str], Path] = {}
        for name in self._there:
            with contextlib.suppress(HostdevError):
                segments |= folder.segments_of(folder.Checkpoint(self.path / name, manifest.read(self.path / name)))
        return {key: path.relative_to(self.path).as_posix() for key, path in segments.items()}

    def _require_alone(self) -> None:
        """Raise StoreError if another process has begun to write to the store after this one."""
        if self.store.read_if_there(WRITER) != self._token:
            raise StoreError(
                f"{self.store.shown} is in use: another process has begun to write checkpoints there; end one"
            )
