"""Stores that fsspec knows; pandas, Dask and torch use fsspec, too.

Each kind of store needs its own package (s3fs, gcsfs, adlfs). The package finds the credentials; hostdev never sees
them.
"""

import base64
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from hostdev.core.addresses import without_secrets
from hostdev.core.errors import StoreError, in_words
from hostdev.core.stores import About, StoreBackend

_TRANSIENT_STATES = {408, 425, 429}  # HTTP status codes; those from 500 on are transient, too
_TRANSIENT_NAMES = (  # parts of the names of error classes
    *("Connect", "Timeout", "TimedOut", "Incomplete", "Payload", "Disconnect", "Retrieval", "HTTPClient", "Server"),
    *("Parser", "Throttl", "Too", "Checksum"),  # Checksum: the answer was damaged in transit
)
_TRANSIENT_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}  # S3, status 400
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
# Keys of the version and of the time of change in fsspec's `info`: each kind of store uses some of them.
_VERSIONS = "ETag", "etag", "generation", "LastModified", "last_modified", "mtime", "created"
_TIMES = "LastModified", "last_modified", "mtime", "updated", "created"


class FsspecStore(StoreBackend):
    """A folder in a store, accessed through fsspec; see `stores.StoreBackend`."""

    def __init__(self, address: str) -> None:
        import fsspec

        scheme = address.partition("://")[0].lower()
        try:
            self.files, root = fsspec.core.url_to_fs(address)
        except ImportError as error:
            advice = f"pip install 'hostdev[{_EXTRAS[scheme]}]'" if scheme in _EXTRAS else "install it"
            shown = without_secrets(address).rstrip("/")
            raise StoreError(f"{shown} needs a package that is missing ({in_words(error)}); {advice}") from None
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def about(self, name: str) -> About | None:
        """See `StoreBackend`."""
        path = self._path(name)
        self.files.invalidate_cache(path.rpartition("/")[0])
        try:
            facts = self.files.info(path)
        except FileNotFoundError:
            return None
        return _make_about(facts) if facts.get("type", "file") == "file" else None

    def list(self, name: str) -> dict[str, About]:
        """See `StoreBackend`."""
        path = self._path(name)
        self.files.invalidate_cache()
        listed = self.files.find(path, detail=True)
        return {file[len(path) :].lstrip("/"): _make_about(facts) for file, facts in listed.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StoreBackend`."""
        if stop is None:
            return bytes(self.files.cat_file(self._path(name)))
        return bytes(self.files.cat_file(self._path(name), start=start, end=stop))

    def put(self, path: Path, name: str) -> None:
        """See `StoreBackend`."""
        self.files.put_file(str(path), self._path(name))

    def copy(self, source: str, name: str) -> None:
        """See `StoreBackend`."""
        self.files.cp_file(self._path(source), self._path(name))

    def remove(self, name: str) -> None:
        """See `StoreBackend`."""
        self.files.rm_file(self._path(name))

    @staticmethod
    def is_transient(error: Exception) -> bool:
        """See `StoreBackend`; errors are recognized by S3 error code, HTTP status, or the name of their class."""
        for cause in (error, error.__cause__):  # s3fs raises its own errors, with the client's as their cause
            response = getattr(cause, "response", None)
            if isinstance(response, dict) and response.get("Error", {}).get("Code") in _TRANSIENT_CODES:
                return True
        response = getattr(error, "response", None)
        of_boto = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        for state in (of_boto, getattr(error, "status", None), getattr(error, "code", None)):
            if isinstance(state, int) and state >= 400:
                return state >= 500 or state in _TRANSIENT_STATES
        if isinstance(error, OSError):
            return StoreBackend.is_transient(error)
        return any(word in type(error).__name__ for word in _TRANSIENT_NAMES)

    @staticmethod
    def describe(error: Exception) -> str:
        """See `StoreBackend`."""
        if type(error).__name__ in _NO_CREDENTIALS:
            return f"no credentials ({without_secrets(in_words(error))})"
        return StoreBackend.describe(error)


def _make_about(facts: Mapping[str, Any]) -> About:
    """Convert the facts about a file that fsspec returns."""
    version = next((facts[key] for key in _VERSIONS if facts.get(key) is not None), None)
    changed = next((facts[key] for key in _TIMES if facts.get(key) is not None), 0)
    if isinstance(changed, str):
        changed = datetime.fromisoformat(changed)
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    md5 = str(facts.get("ETag") or "").strip('"')
    if facts.get("md5Hash"):  # Google Cloud Storage: in base64
        md5 = base64.b64decode(facts["md5Hash"]).hex()
    return About(int(facts.get("size") or 0), str(version), int(changed * 1_000_000_000), md5)
