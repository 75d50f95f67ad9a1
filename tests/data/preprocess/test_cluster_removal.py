"""What a cluster has left in its folder of work is removed at the end."""

import contextlib
import errno
import re
import shutil
import threading
import time

import pytest

from hostdev.core.errors import UserError
from hostdev.data.preprocess.work import claim


def test_work_is_removed_while_tasks_still_write(tmp_path):
    """As after an error in the input, when other workers have not ended their tasks."""
    begun, ended = threading.Event(), threading.Event()

    def write():
        while not ended.is_set():
            with contextlib.suppress(OSError):
                (work.pieces / f"{time.monotonic_ns()}").write_bytes(b"")
            begun.set()

    writing = [threading.Thread(target=write) for _ in range(3)]
    try:
        with pytest.raises(UserError, match="the input is wrong"), claim(tmp_path / "set") as work:
            work.pieces.mkdir(parents=True)
            for number in range(500):
                (work.pieces / f"{number}").write_bytes(b"")
            for thread in writing:
                thread.start()
            begun.wait()
            raise UserError("the input is wrong")
    finally:
        ended.set()
        for thread in writing:
            thread.join()
    assert list(tmp_path.iterdir()) == []


def test_work_that_cannot_be_removed(tmp_path, monkeypatch, capfd):
    """What the user needs to know is still what was wrong with the input."""

    def rmtree(path, **_):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(UserError, match="the input is wrong"), claim(tmp_path / "set") as work:
        work.pieces.mkdir(parents=True)
        raise UserError("the input is wrong")
    assert re.search(
        rf"the work folder could not be removed; do that by hand \(.*Directory not empty\): {tmp_path}/.set.partial\n",
        capfd.readouterr().err,
    )
