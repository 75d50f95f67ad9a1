"""Python processes of tests, forked by a server that has torch, numba and hostdev imported: 0.2 s each, not 2.5 s.

`Popen` and `run` are those of `subprocess`. A process gets its own arguments, environment, folder, standard files,
session and passed descriptors; it is this process's child, with a program that begins at its first line. Python itself
starts if the command is no plain `python (-c CODE | -m MODULE | SCRIPT)`, if a terminal or `preexec_fn` is given, and
everywhere if HOSTDEV_TESTS_EXEC is set, as `make test-slow` does. Call `subprocess` where a test is about imports,
memory, `/proc/PID/cmdline` or the environment of a process's first moment.

- Libraries read some variables once: each set of their values has servers of its own.
- The ranks of a training come from two servers in turn, whose hashes of strings differ as those of real processes do.
- The ranks that `--spawn` of a forked process starts are forked, too.
- A server runs no kernel: a process forked after one has no threads for the next. Threads of OpenBLAS and Arrow are
  there from the import on, and these libraries start them again in a fork.
"""

import atexit
import ctypes
import gc
import importlib
import importlib.machinery
import inspect
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "numba", "numpy", "pyarrow.compute"),
    *("pyarrow.csv", "pyarrow.dataset", "tqdm", "psutil", "hostdev", "hostdev.ops", "hostdev.ext.training.command"),
    *(
        "hostdev.distributed.rank_environment",
        "hostdev.train.processes",
        "hostdev.train.quality",
        "hostdev.data.preprocess.build",
    ),
)
# Variables that libraries read when they are imported, by how their names begin.
READ_ONCE = (
    *("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMBA_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_"),
    *("ATEN_", "DNNL_", "ONEDNN_", "LD_", "MALLOC_", "GLIBC_", "THP_", "LANG", "LC_", "TZ", "ARROW_", "HOSTDEV_TESTS_"),
)
EXEC = "HOSTDEV_TESTS_EXEC"
RANK_VARIABLES = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK_TABLE_FILE"}  # torch's store is quiet with them
_MOST_SERVERS = 6
_SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER
_PARAMETERS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
_servers: dict[tuple, "list[_Server]"] = {}
_uses: Counter[tuple] = Counter()
_lock = threading.Lock()
_kept = []  # sockets whose closing ends a server
_own = None  # in a forked process with `--spawn`: where to ask for the ranks that it starts
pictures = False  # whether a training draws its curve, as conftest.py decides for each test


class Popen(subprocess.Popen):
    """A process, forked where that is the same."""

    def _execute_child(self, *given):
        how = dict(zip(_PARAMETERS, given, strict=True))
        request = _request(how)
        with _lock:
            address = request and (_own or _address_of_server(request["env"], "--spawn" in request["argv"]))
            if address:
                self.pid = _fork_from(address, request, _standard_files(how))
        if not address:
            super()._execute_child(*given)
            return
        pipes = [how[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(command, *, input=None, capture_output=False, timeout=None, check=False, **how):
    """Run a command as `subprocess.run` does."""
    if capture_output:
        how.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if input is not None:
        how["stdin"] = subprocess.PIPE
    with Popen(command, **how) as process:
        try:
            out, error = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, error)
    if check:
        done.check_returncode()
    return done


def stop():
    """End the servers."""
    for server in [server for servers in _servers.values() for server in servers]:
        server.stop()
    _servers.clear()


def _request(how):
    """Return what a server needs to know, or None if Python itself has to start."""
    command = how["args"]
    program = None if isinstance(command, str | bytes | os.PathLike) else list(map(os.fsdecode, command))
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in (how["env"] or os.environ).items()}
    end = how["preexec_fn"] if _own and how["preexec_fn"] is _start().die_with_parent else None
    usual = {"executable": (None,), "preexec_fn": (end,), "close_fds": (True,), "shell": (False,), "gid": (None,)}
    usual |= {"gids": (None,), "uid": (None,), "umask": (-1,), "restore_signals": (True,), "process_group": (-1, None)}
    other = [name for name, values in usual.items() if name in how and how[name] not in values]
    if os.environ.get(EXEC) or env.get(EXEC) or sys.platform != "linux" or other or not program or len(program) < 2:
        return None
    if program[0] != sys.executable or (program[1].startswith("-") and program[1] not in ("-c", "-m")):
        return None
    if program[1] in ("-c", "-m") and len(program) < 3:
        return None
    try:
        if any(os.isatty(file) for file in _standard_files(how)[:3]) or not all(map(os.fstat, _standard_files(how))):
            return None
    except OSError:  # one is closed
        return None
    folder = os.path.join(os.getcwd(), os.fsdecode(how["cwd"] or ""))  # noqa: PTH109, PTH118
    passed = list(map(int, how["pass_fds"]))
    return {
        **{"argv": program, "env": env, "folder": folder, "passed": passed, "pictures": pictures},
        **{"session": how["start_new_session"], "dies": end is not None},
        "spawns": not _own and "--spawn" in program,
    }


def _start():
    return sys.modules["hostdev.distributed.rank_environment"]


def _standard_files(how):
    files = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
    return [number if file == -1 else file for number, file in enumerate(files)] + list(map(int, how["pass_fds"]))


def _address_of_server(env, spawns):
    """Return where to ask a server whose libraries have read the same variables, or None."""
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    if {*paths, "", str(ROOT)} != {"", str(ROOT)}:
        return None
    read = {name: value for name, value in env.items() if name.startswith(READ_ONCE) and name != "PYTHONPATH"}
    is_rank = spawns or not RANK_VARIABLES.isdisjoint(env)
    key = is_rank, *sorted(read.items())
    _uses[key] += 1
    servers = _servers.setdefault(key, [])
    if len(servers) < 1 + is_rank:
        if _uses[key] == 1 or sum(map(len, _servers.values())) == _MOST_SERVERS:
            return None  # a server costs as much as a process
        quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL"} if is_rank else {}
        servers.append(_Server({**quiet, **env, "PYTHONPATH": str(ROOT)}))
    else:
        servers.append(servers.pop(0))
    return servers[-1].address


class _Server:
    """A server, which ends when the socket to it is closed."""

    def __init__(self, env):
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening, self.address = _listen(other)
        code = f"from tests import forks; forks.serve({other.fileno()}, {listening.fileno()})"
        with other, listening:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env={name: value for name, value in env.items() if name not in RANK_VARIABLES},
                pass_fds=[other.fileno(), listening.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def stop(self):
        self._socket.close()
        self._process.wait()


def _fork_from(address, request, files):
    """Return the id of a new child of this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)  # the child's own parent ends, and this process gets it
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(address)
            socket.send_fds(server, [json.dumps(request).encode()], files)
            return int(server.recv(32) or f"the server {address} has ended")
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def serve(descriptor, listening_descriptor):
    """Fork a process for each request until the other end is closed."""
    other, listening = socket.socket(fileno=descriptor), socket.socket(fileno=listening_descriptor)
    for module in IMPORTED:
        importlib.import_module(module)
    target = sys.modules["numba.core.registry"].cpu_target
    target.typing_context.refresh()  # what the first kernel of a process imports
    target.target_context.refresh()
    gc.collect()
    gc.freeze()
    assert not sys.modules["numba.np.ufunc.parallel"]._is_initialized, "a kernel has run"
    _become(*_asked(other, listening))


def _asked(other, listening):
    """Fork for each request; return it, and its files, in the fork."""
    while True:
        if other in select.select([other, listening], [], [])[0]:
            os._exit(0)
        asking, _ = listening.accept()
        message, files, _, _ = socket.recv_fds(asking, 1 << 20, 64)
        if _fork_for(asking, files):
            continue
        other.close()
        listening.close()
        return json.loads(message), files


def _fork_for(asking, files):
    """Fork a child of the process that asks. Return True here, and False in the child."""
    read, write = os.pipe()
    between = _fork()
    if between:
        os.close(write)
        child = os.read(read, 32)
        os.close(read)
        os.waitpid(between, 0)  # now it is
        asking.send(child)
        asking.close()
        for file in files:
            os.close(file)
        return True
    between = os.getpid()
    child = _fork()
    if child:
        os.write(write, str(child).encode())
        os._exit(0)
    for file in (read, write):
        os.close(file)
    asking.close()
    while os.getppid() == between:
        time.sleep(0.0002)
    return False


def _fork():
    with warnings.catch_warnings():  # of Python 3.12: there are threads
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(request, files):
    """Make this process what Python would be for the request, and run the program."""
    if request["dies"]:
        _start().die_with_parent()
    if request["spawns"]:
        _fork_a_server(files)
    if request["session"]:
        os.setsid()
    for number, file in zip((0, 1, 2, *request["passed"]), _above(files, request["passed"]), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.modules.pop("hostdev.core.environment")  # its import sets variables
    _reopen_standard_files()
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    importlib.invalidate_caches()
    if not request["env"].get("PYTHONPATH"):
        sys.path.remove(str(ROOT))  # the first, of the server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not request["pictures"]:
        sys.modules["hostdev.train.quality"].draw = lambda path, *of_run: path.write_bytes(b"")
    try:
        _run_program(request["argv"])
    except SystemExit as exit:
        code = exit.code
    else:
        code = 0
    _end(code)


def _fork_a_server(files):
    """Fork a server for the ranks that this process starts: they are to be its children."""
    global _own
    other, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening, address = _listen(other)
    if os.fork():
        other.close()
        listening.close()
        ours.set_inheritable(False)
        _kept.append(ours)
        _own = address
        _start().subprocess = sys.modules[__name__]
        return
    _start().die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ours.close()
    for file in files:
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    _become(*_asked(other, listening))


def _listen(other):
    """Return a listening socket and its address, which no other has."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"\0hostdev-forks-{os.getpid()}-{other.fileno()}-{time.monotonic_ns()}"
    listening.bind(address)
    listening.listen(64)
    return listening, address


def _end(code):
    """End as Python does, but leave the modules' objects, which takes it half a second. Return if something fails."""
    threading._shutdown()
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python tells it
    os._exit((code or 0) & 0xFF)


def _above(files, passed):
    """Return the files under numbers that no file of the program has."""
    import fcntl

    above = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max([2, *passed]) + 1) for file in files]
    for file in files:
        os.close(file)
    return above


def _reopen_standard_files():
    """Make `sys.stdin`, `sys.stdout` and `sys.stderr` as Python does when it starts."""
    for number, name, mode in ((0, "stdin", "rb"), (1, "stdout", "wb"), (2, "stderr", "wb")):
        earlier = getattr(sys, name)
        raw = bool(number and earlier.write_through)
        file = open(number, mode, buffering=0 if raw else -1, closefd=False)  # noqa: SIM115
        text = io.TextIOWrapper(file, earlier.encoding, earlier.errors, "\n" if number else None, False, raw)
        text.reconfigure(line_buffering=number == 2 and not raw)
        (file if raw else file.raw).name = f"<{name}>"
        text.mode = mode[0]
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _run_program(argv):
    kind, *rest = argv[1:]
    sys.orig_argv = argv
    sys.argv = [kind, *rest[1:]] if kind in ("-c", "-m") else [kind, *rest]
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    if kind == "-m":
        sys.path[0] = os.getcwd()  # noqa: PTH109
        runpy._run_module_as_main(rest[0])
    elif kind == "-c":
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(kind))  # noqa: PTH120
        path = os.path.abspath(kind)  # noqa: PTH100
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__file__, main.__loader__, main.__cached__ = path, loader, None
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)
