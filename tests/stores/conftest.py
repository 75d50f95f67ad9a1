"""An S3 server for tests, whose requests may fail, and data sets in it."""

import contextlib
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.distributed.processes import wait_until

SECRETS = {"AWS_ACCESS_KEY_ID": "an-id", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """An S3 server in a process of its own."""

    def __init__(self, folder, every=0, seconds=0):
        self.folder = folder
        command = [sys.executable, "-m", "tests.stores.server", folder, every, seconds]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=log, stderr=log)
        wait_until(lambda: (folder / "port").exists() or self._process.poll() is not None)
        assert self._process.poll() is None, (folder / "log").read_text()
        self.environment = {**SECRETS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{(folder / 'port').read_text()}"}

    def put(self, source, address):
        """Copy a folder to a new bucket, or to one that is there."""
        code = (
            "import sys, s3fs\n"
            "files, source, to = s3fs.S3FileSystem(), *sys.argv[1:]\n"
            "bucket = to.partition('/')[0]\n"
            "files.exists(bucket) or files.mkdir(bucket)\n"
            "files.put(source, to, recursive=True)\n"
        )
        to = address.removeprefix("s3://")
        subprocess.run([sys.executable, "-c", code, source, to], check=True, env={**os.environ, **self.environment})

    @contextlib.contextmanager
    def away(self, how="away"):
        """Let all requests fail in a `with` block; with `how="denied"`, as without rights."""
        (self.folder / how).touch()
        try:
            yield
        finally:
            (self.folder / how).unlink()

    @property
    def requests(self):
        return int((self.folder / "requests").read_text())

    def end(self):
        self._process.terminate()
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("s3"), every=10, seconds=0.3)
    yield made
    made.end()
