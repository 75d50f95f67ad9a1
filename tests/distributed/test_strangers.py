"""Listeners of a run, and what strangers can do there: nothing from another host, and nothing without the token."""

import socket
import sys
import threading
import time
from datetime import timedelta

import psutil
import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hostdev.core.errors import UserError
from hostdev.distributed import monitor, rendezvous
from hostdev.distributed.agreement import RankCalls
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import RankEnvironment
from tests.distributed.conftest import Trained, flags_of
from tests.distributed.processes import wait_until
from tests.distributed.test_faults import TRAIN
from tests.ports import free_port

ESCAPES = "\x1b[31m\x1b]0;title\x07"


def place(port, rank=0, **more):
    return RankEnvironment(rank, 2, rank, 2, "127.0.0.1", port, "test")._replace(**more)


@pytest.fixture
def silent():
    """Return a port whose listener stays silent."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_silent_program_has_the_port(silent):
    since = time.monotonic()
    words = f"rank 1 of 2: the listener at 127.0.0.1:{silent} does not answer within 1 s; another program may have"
    with pytest.raises(UserError, match=words):
        Ranks(place(silent, rank=1), lambda *_: None, meeting=1)
    assert time.monotonic() - since < 30


def test_a_store_listens_at_the_address_of_its_ranks():
    """And not at all addresses of the host, where other hosts reach it."""
    port = free_port()
    store = rendezvous._open(place(port), 5)
    found = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in found if each.port == port] == ["127.0.0.1"]
    del store


def test_what_is_not_signed_is_no_failure():
    here = place(free_port(), token="secret")
    store = rendezvous._open(here, 5)
    ours = monitor.Monitor(here, "hostdev", RankCalls(0, 2), lambda *_: None)
    theirs = PrefixStore("hostdev", store)
    for message in (
        "",
        "1 " + ESCAPES,
        "x" * 64 + " 1 " + ESCAPES,
        monitor._signed("", "1 why"),
        "ÿ" * 80,
    ):
        theirs.set("fault", message)
        assert ours._look(1, [], {}) is None
    for text in ("7 of too many", "none", "-1 below"):
        theirs.set("fault", monitor._signed("secret", text))
        assert ours._look(1, [], {}) is None
    theirs.set("fault", monitor._signed("secret", "1 why " + ESCAPES + "x" * 10_000))
    rank, why = ours._look(1, [], {})
    assert rank == 1
    assert why.startswith("why \\x1b[31m\\x1b]0;title\\x07x")
    assert len(why) <= 500


def listening(parent):
    """Return the listening addresses of a process and its children."""
    found = []
    for process in [parent, *parent.children(recursive=True)]:
        try:
            found += [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
    return found


def disturb(address, done):
    """Connect, and set what ends a run that listens to anybody."""
    try:
        store = TCPStore(address.ip, address.port, is_master=False, timeout=timedelta(seconds=3))
        for prefix in ("hostdev-0", "hostdev--0", "", "groups"):
            for name in ("fault", "wrong", "alive/0", "alive/1", "answer"):
                PrefixStore(prefix, store).set(name, f"1 {ESCAPES}")
        done.append(address)
    except Exception as error:  # gloo's own sockets are no stores
        done.append(error)


def test_strangers_cannot_end_a_spawned_run(processes, small_data, alone):
    flags = ("--emb-dim", 4)
    folder = processes.folder / "run"
    process = processes.start(sys.executable, *TRAIN, *flags_of(small_data, folder, *flags, M=4), "--spawn", 2)
    parent, seen, done, threads = psutil.Process(process.pid), set(), [], []

    def look():
        if process.poll() is not None:
            return True
        time.sleep(0.2)  # to look takes time
        for address in listening(parent):
            assert address.ip == "127.0.0.1"
            if address not in seen:
                seen.add(address)
                threads.append(threading.Thread(target=disturb, args=(address, done), daemon=True))
                threads[-1].start()
        return False

    wait_until(look, 200)
    [ended] = processes.ended()
    assert ended.code == 0, ended
    assert "\x1b[31m" not in ended.out + ended.err
    assert seen
    assert any(address in done for address in seen)
    assert Trained(folder) == alone(small_data, *flags, M=4)
