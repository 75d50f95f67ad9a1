"""The last line of a process whose served file was truncated: no Python code can run then."""

import ctypes
import signal

import numba

_libc = ctypes.CDLL(None)
_write, _signal = _libc.write, _libc.signal
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_ssize_t
_signal.argtypes, _signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
_kept: list[object] = []  # what the handler uses


def announce_lost_files(prog: str) -> None:
    """Print a line on SIGBUS, which is sent at a look at a part of a mapped file that is gone; then end by it."""
    line = (
        f"{prog}: error: a file that is served was cut, or its disk failed (SIGBUS); serve a folder in which nothing "
        "changes files\n"
    ).encode()
    buffer = ctypes.create_string_buffer(line)
    address, size, write, reset = ctypes.addressof(buffer), len(line), _write, _signal

    def handle(number):  # type: ignore[no-untyped-def]
        write(2, address, size)
        reset(number, 0)  # the default: the same look, once more, ends the process

    handler = numba.cfunc("void(int32)")(handle)
    _kept[:] = [buffer, handler]
    _signal(signal.SIGBUS, handler.address)
