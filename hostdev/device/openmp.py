"""Limits how long OpenMP's idle threads spin, in a process that imported torch before hostdev could.

torch's CPU operations run on the threads of GNU OpenMP (libgomp). After each operation, these threads spin for
milliseconds, on cores that the host's kernels need. `hostdev.core.environment` limits the rounds of spinning in
hostdev's own processes, but libgomp reads this setting only once, when torch is imported. However, threads spin for
only a hundredth of the time while a process has more OpenMP threads than cores. Therefore this module starts a thread
that keeps a team of two OpenMP threads, which costs nothing.

Source: `gomp_thread_start` and `do_spin` in GCC's libgomp (wait.h, team.c: `gomp_managed_threads`).
"""

import ctypes
import os
import threading

import torch

_SETTINGS = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # set by the user, or by `hostdev.core.environment`
_started = threading.Lock()


def limit_spinning() -> None:
    """Limit spinning in this process from now on.

    Do nothing if the environment variables say how threads wait, or if torch has a single thread.
    """
    if _SETTINGS & os.environ.keys() or torch.get_num_threads() == 1 or not _started.acquire(blocking=False):
        return
    ready = threading.Event()
    threading.Thread(target=_hold_team, args=(ready,), name="hostdev-openmp", daemon=True).start()
    ready.wait()


def _hold_team(ready: threading.Event) -> None:
    """Run a parallel operation on a team of two threads, then wait forever, because the team ends with this thread."""
    try:
        torch.get_num_threads()  # makes torch set this thread's team size; the next line changes it
        ctypes.CDLL(None).omp_set_num_threads(2)  # for this thread only; torch has loaded the library
        torch.zeros(1 << 16).add_(1)
    except AttributeError:  # a torch without OpenMP
        return
    finally:
        ready.set()
    threading.Event().wait()


def _after_fork() -> None:
    """Let a forked child start its own team: threads do not survive a fork."""
    global _started
    _started = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
