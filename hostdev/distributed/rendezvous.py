"""The rendezvous of a run's processes at a store on the host of rank 0."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hostdev.core.errors import UserError
from hostdev.core.printable import printable
from hostdev.core.workers import run_in_thread
from hostdev.distributed.agreement import Values, compare, format_ranks
from hostdev.distributed.rank_environment import LISTEN_VARIABLE, RankEnvironment, listen_at

NOTICE_SECONDS = 0.5  # time for others to read the cause before the store ends with rank 0
_GRACE_SECONDS = 2.0  # wait beyond torch's own timeout


def make_key_prefix(env: RankEnvironment) -> str:
    """Return the prefix of this run's keys in the store, different for each restart and unknown to other programs."""
    return f"hostdev-{env.token}-{env.attempt}"


def meet(env: RankEnvironment, seconds: float, values: Values | None = None) -> Any:
    """Join the run's store, and return it once all ranks have joined.

    Args:
        env: The rank environment of this process.
        seconds: Timeout for all ranks to join.
        values: Values that must be equal on all ranks.

    Raises:
        UserError: Ranks are missing after the timeout or contradict each other; the message names them.
        UnlikeError: The values differ; raised on all ranks.
    """
    where = f"{env.address}:{env.port}"
    store = _open(env, seconds)
    mine = PrefixStore(make_key_prefix(env), store)
    missing = list(range(env.ranks))
    try:
        announce(mine, env, values)
        deadline = time.monotonic() + seconds
        while missing and time.monotonic() < deadline:
            if mine.check(["wrong"]):
                wrong = mine.get("wrong").decode(errors="replace")
                time.sleep(NOTICE_SECONDS)
                raise UserError(printable(wrong))
            missing = [rank for rank in missing if not mine.check([f"here/{rank}"])]
            if missing:
                time.sleep(0.05)  # other ranks are starting
        each = [] if missing else [_values(mine.get(f"values/{rank}")) for rank in range(env.ranks)]
    except RuntimeError:
        raise UserError(
            f"rank {env.rank} of {env.ranks}: rank 0 at {where} ended before {format_ranks(missing)} arrived"
        ) from None
    if missing:
        raise UserError(f"{format_ranks(missing)} of {env.ranks} did not reach {where} within {seconds:g} s")
    _compare_together(mine, env, each)
    return mine


def announce(store: Any, env: RankEnvironment, values: Values | None = None) -> None:
    """Announce this rank in the store.

    Raises UserError on all ranks that have joined, if another process has the same rank or a different number of ranks.
    """
    me = f"{socket.gethostname()} pid {os.getpid()}"
    wrong = None
    ranks = store.compare_set("ranks", "", f"{env.ranks}").decode(errors="replace")
    store.set(f"values/{env.rank}", json.dumps(dict(values or {})))
    if ranks != f"{env.ranks}":  # not counted as present, or others would think that all have joined
        wrong = (
            f"rank {env.rank} ({me}) was started as one of {env.ranks} ranks, another as one of {ranks}; start all "
            "with the same number of ranks"
        )
    elif (first := store.compare_set(f"here/{env.rank}", "", me).decode(errors="replace")) != me:
        wrong = f"two processes were started as rank {env.rank}: {first} and {me}; give each a different rank"
    if wrong is not None:
        store.set("wrong", wrong)
        time.sleep(NOTICE_SECONDS)
        raise UserError(printable(wrong))


def share_texts(store: Any, env: RankEnvironment, name: str, text: str) -> list[str]:
    """Return the texts that the ranks passed, by rank.

    Rank 0, which may serve the store, waits until all ranks have read the texts.
    """
    store.set(f"{name}/{env.rank}", text)
    keys, read = ([f"{prefix}/{rank}" for rank in range(env.ranks)] for prefix in (name, f"{name}-read"))
    store.wait(keys)
    texts = [each.decode() for each in store.multi_get(keys)]
    store.set(read[env.rank], "")
    if env.rank == 0:
        store.wait(read)
    return texts


def versions() -> Values:
    """Return package versions that must be equal on all ranks, for bit-identical results and a common protocol."""
    import hostdev

    return {"the version of hostdev": hostdev.__version__, "the version of torch": torch.__version__}


def connect(env: RankEnvironment, seconds: float, **how: Any) -> Any:
    """Return a TCPStore at the rendezvous address; raise UserError if no answer comes within `seconds`.

    torch waits forever for a listener that accepts the connection and stays silent, so a separate thread connects.
    """
    within = timedelta(seconds=seconds)
    connecting = run_in_thread("hostdev-connect", lambda: TCPStore(env.address, env.port, timeout=within, **how))
    wait([connecting], seconds + _GRACE_SECONDS)
    if not connecting.done():
        if not _is_listening(env):  # torch's pauses between its tries may be longer than its timeout
            raise _unreachable(env, seconds)
        raise UserError(
            f"rank {env.rank} of {env.ranks}: the listener at {env.address}:{env.port} does not answer within "
            f"{seconds:g} s; another program may have this port: choose another MASTER_PORT"
        )
    return connecting.result()


def find_interface(env: RankEnvironment) -> str:
    """Return the name of the network interface that reaches the other ranks."""
    if env.all_here:
        host = "127.0.0.1"
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((env.address, env.port or 1))
            host = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    raise UserError(f"no network interface has the address {host}; set GLOO_SOCKET_IFNAME")


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return printable(str(error).splitlines()[0]) if str(error) else type(error).__name__


def _open(env: RankEnvironment, seconds: float) -> Any:
    """Return the store, which rank 0 serves unless the launcher does; raise UserError if it cannot be reached."""
    where, hosts = f"{env.address}:{env.port}", env.rank == 0 and not env.hosted
    how: dict[str, Any] = {}
    if hosts and (listening := _listen(env)) is not None:
        how["master_listen_fd"] = listening.detach()
    try:
        return connect(
            env, seconds, world_size=env.ranks, is_master=hosts, wait_for_workers=False, multi_tenant=True, **how
        )
    except (RuntimeError, dist.DistError) as error:
        if hosts:
            raise UserError(
                f"rank 0 cannot listen at {where}: {get_first_line(error)}; choose another MASTER_PORT"
            ) from None
        raise _unreachable(env, seconds) from None


def _unreachable(env: RankEnvironment, seconds: float) -> UserError:
    return UserError(
        f"rank {env.rank} of {env.ranks} cannot reach rank 0 at {env.address}:{env.port} within {seconds:g} s; is "
        "rank 0 running, and are MASTER_ADDR and MASTER_PORT right?"
    )


def _is_listening(env: RankEnvironment) -> bool:
    """Return whether any program accepts connections at the rendezvous address."""
    try:
        with socket.create_connection((env.address, env.port), timeout=_GRACE_SECONDS):
            return True
    except OSError:
        return False


def _listen(env: RankEnvironment) -> socket.socket | None:
    """Return a socket that listens only at the rendezvous address; None if ranks run on several hosts or on failure.

    If None is returned, torch itself listens, on all interfaces, or reports what is wrong.
    """
    inherited = os.environ.pop(LISTEN_VARIABLE, "")
    if inherited.isdecimal():
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=int(inherited))
            if found.getsockname()[1] == env.port:
                return found
    if not env.all_here:
        return None
    with contextlib.suppress(OSError):
        known = socket.getaddrinfo(env.address, env.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in sorted(known, key=lambda one: one[0] != socket.AF_INET):
            with contextlib.suppress(OSError):
                return listen_at(address, family, kind, protocol)
    return None


def _values(text: bytes) -> Values:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _compare_together(store: Any, env: RankEnvironment, each: Sequence[Values]) -> None:
    """Compare the ranks' values. If they differ, wait up to 5 s until all ranks have read them from rank 0's store."""
    store.set(f"seen/{env.rank}", "")
    if not all(each):  # a rank has announced no values
        return
    try:
        compare(each)
    except UserError:
        seen = [f"seen/{rank}" for rank in range(env.ranks)]
        _wait_until(lambda: store.check(seen), 10 * NOTICE_SECONDS)
        raise


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):
        while not is_so() and time.monotonic() < deadline:
            time.sleep(0.05)
