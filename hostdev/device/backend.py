"""Which device, how much memory it has free, and deterministic arithmetic on it."""

import os

import torch

from hostdev.errors import UserError
from hostdev.memory import available_bytes


def select(name: str) -> torch.device:
    """Return the device of this name; "auto" is the accelerator if there is one, else the CPU.

    Raises UserError where there is no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":  # MPS has no float64, which FTRL's powers and --l2 table need; it can be asked for
        return accelerator if accelerator is not None and accelerator.type != "mps" else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: there is no such kind of device; use auto, cpu or cuda") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        seen = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise UserError(f"--device {name}: torch {torch.__version__} sees {seen} on this machine; use --device auto")
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise UserError(f"--device {name}: this machine has {count} of them, numbered from 0")
    torch.accelerator.set_device_index(device.index or 0)
    return device


def is_accelerator(device: torch.device) -> bool:
    """Tell whether the device has memory of its own."""
    return device.type != "cpu"


def make_deterministic(device: torch.device) -> None:
    """Allow deterministic operations only; call it before the first one."""
    if device.type == "cuda":  # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # No filling of new memory with NaN: every byte that is read was written before.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def free_bytes(device: torch.device) -> int | None:
    """Return the device's free memory in bytes; None where torch cannot tell."""
    if not is_accelerator(device):
        return available_bytes()
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    return None


def describe(device: torch.device) -> str:
    """Return the device as text, with the accelerator's product name where torch tells it."""
    if not is_accelerator(device):
        return "cpu"
    module = torch.get_device_module(device)
    product = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
    return f"{device} ({product})" if product else str(device)
