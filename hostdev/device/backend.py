"""Choice of the device, its free memory, deterministic arithmetic on it, and a limit for idle threads of OpenMP.

torch's CPU operations run on the threads of GNU OpenMP (libgomp). After each operation, these threads spin for
milliseconds, on cores that the host's kernels need. `hostdev.core.environment` limits the rounds of spinning in
hostdev's own processes, but libgomp reads this setting only once, when torch is imported. However, threads spin for
only a hundredth of the time while a process has more OpenMP threads than cores. Therefore, in a process that imported
torch before hostdev could, `limit_spinning` starts a thread that keeps a team of two OpenMP threads, which costs
nothing.

Source: `gomp_thread_start` and `do_spin` in GCC's libgomp (wait.h, team.c: `gomp_managed_threads`).
"""

import ctypes
import os
import sys
import threading

import torch

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, cache_room

_TF32_CAPABILITY = (8, 0)  # Ampere, the first GPUs with TF32
_SETTINGS = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # set by the user, or by `hostdev.core.environment`
_started = threading.Lock()


def select(name: str, option: str = "--device ") -> torch.device:
    """Return the device of this name; "auto" means the accelerator, or the CPU if there is none with streams.

    An accelerator becomes the current device. A name without an index means the current accelerator.

    Args:
        name: "auto", "cpu", "cuda", "cuda:1", ...
        option: The option that named the device, as the start of error messages.

    Raises:
        UserError: There is no such device, or torch has no streams on it, which are needed to copy rows during a step.
    """
    accelerator = _accelerator()
    if name == "auto":
        if accelerator is None or _find_missing(accelerator):
            return torch.device("cpu")
        return _get_current(accelerator)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{option}{name}: unknown kind of device; use auto, cpu or cuda") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        raise UserError(f"{option}{name}: {_explain_missing(device, accelerator)}, or use {option}auto")
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise UserError(f"{option}{name}: this machine has only {count} of these devices, numbered from 0")
    if missing := _find_missing(device):
        raise UserError(
            f"{option}{name}: torch has no streams on this device, which are needed to copy rows during a step "
            f"(torch.{device.type} lacks {', '.join(missing)}); use {option}cpu"
        )
    if ":" not in name:
        return _get_current(device)
    torch.accelerator.set_device_index(device.index)
    return device


def assign_device(number: int) -> None:
    """Assign the host's devices to its processes round-robin, and make this process's device the current one.

    Args:
        number: The process's index on this host, or the index of the device to use.
    """
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(number % torch.accelerator.device_count())


def require(device: torch.device | str) -> torch.device:
    """Return the device of this name, or this torch.device with its index; raise UserError if there is none."""
    if isinstance(device, str):
        return select(device, "device=")
    accelerator = _accelerator()
    if is_accelerator(device) and (accelerator is None or device.type != accelerator.type):
        raise UserError(f"device={device}: {_explain_missing(device, accelerator)}, or use device=cpu")
    return torch.empty(0, device=device).device  # the device with its index


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _explain_missing(device: torch.device, accelerator: torch.device | None) -> str:
    """Explain why torch does not see a device of this kind, and what to do."""
    version = f"torch {torch.__version__}"
    if device.type == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"{version} is built without CUDA; install a CUDA build (https://pytorch.org/get-started/locally)"
    if accelerator is not None:
        return f"{version} sees only {accelerator.type} on this machine; use {accelerator.type}"
    if device.type == "cuda":
        return f"{version} sees no accelerator on this machine; check that nvidia-smi and CUDA_VISIBLE_DEVICES show one"
    return f"{version} sees no accelerator on this machine; use a build of torch for {device.type}"


def _get_current(accelerator: torch.device) -> torch.device:
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _find_missing(device: torch.device) -> list[str]:
    """Return the attributes that `Staging` needs but torch's module for the device lacks, such as Stream for MPS."""
    module = torch.get_device_module(device)
    return [name for name in ("Stream", "Event", "stream", "current_stream") if not hasattr(module, name)]


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device has its own memory."""
    return device.type != "cpu"


def make_deterministic(device: torch.device) -> None:
    """Allow only deterministic operations; call this before the first operation."""
    if device.type == "cuda":  # cuBLAS reads this when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The same as torch.use_deterministic_algorithms(True), which would also import torch's compiler.
    torch.set_deterministic_debug_mode("error")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if (compiler := sys.modules.get("torch._inductor.config")) is not None:
        compiler.deterministic = True  # type: ignore[attr-defined]
    # New memory is not filled with NaN: every byte is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_tf32(device: torch.device, on: bool) -> None:
    """Set whether float32 matrix products round inputs to TF32; raise UserError if `on` and the device has no TF32."""
    if on and (device.type != "cuda" or torch.version.hip is not None):
        raise UserError(f"--tf32 has no effect on {describe(device)}; leave out --tf32")
    if device.type != "cuda":
        return
    if on and (found := torch.cuda.get_device_capability(device)) < _TF32_CAPABILITY:
        raise UserError(
            f"--tf32 has no effect on {describe(device)}, whose compute capability is {found[0]}.{found[1]}, below "
            "8.0; leave out --tf32"
        )
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"


def free_bytes(device: torch.device) -> int | None:
    """Return the device's free memory in bytes, or None if torch does not know."""
    if not is_accelerator(device):
        return available_bytes()
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    return None


def get_cache_room(device: torch.device, beside: int = 0) -> int | None:
    """Return the bytes that an embedding cache may take, or None if torch does not know.

    On the CPU, a cache may take all free memory. On an accelerator, `memory.cache_room` reserves a part of the free
    memory, and subtracts `beside` bytes for what is yet to be allocated.
    """
    free = free_bytes(device)
    return cache_room(free, beside) if free is not None and is_accelerator(device) else free


def describe(device: torch.device) -> str:
    """Return the device as text, with the accelerator's product name if torch knows it."""
    if not is_accelerator(device):
        return "cpu"
    module = torch.get_device_module(device)
    product = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
    return f"{device} ({product})" if product else str(device)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the torch generators that layers on a device draw from; on the CPU this is faster than torch.manual_seed."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def limit_spinning() -> None:
    """Limit spinning in this process from now on.

    Do nothing if environment variables say how threads wait, if torch has a single thread, or if this was done before.
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
