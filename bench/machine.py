"""The machine of a device report: device, driver, memory, bandwidths, versions and processor.

Prints one JSON object. Bandwidths are medians of copies of 256 MiB, on an accelerator of pinned memory.
"""

import json
import os
import platform
import subprocess
from typing import Any

import numba
import numpy as np
import psutil
import torch

import hostdev
from bench.record import make_parser, processor
from hostdev.device import backend, clock, triton

COPIED, ROUNDS = 1 << 28, 10


def query(field: str, device: torch.device) -> str | None:
    """Return a field of nvidia-smi for a device; None if nvidia-smi is missing or fails."""
    number = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[number].strip() if number < len(visible) and visible[number].strip() else str(number)
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", f"--id={name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def bandwidths(device: torch.device) -> dict[str, Any]:
    """Return the GB/s of copies to the device and back, and whether they use pinned memory."""
    found = clock.measure(device, COPIED, ROUNDS)
    return {
        "pinned": backend.is_accelerator(device),
        "to_device_gb_per_s": round(found.down / 1e9, 2),
        "to_host_gb_per_s": round(found.up / 1e9, 2),
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the device's properties from torch and the driver."""
    facts: dict[str, Any] = {"device": str(device), "name": backend.describe(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": query("driver_version", device),
            "link": query("pcie.link.gen.current,pcie.link.width.current", device),
            "power_limit": query("power.limit", device),
        }
    return {**facts, "free_bytes": backend.free_bytes(device), "devices": torch.accelerator.device_count()}


def triton_version() -> str | None:
    """Return Triton's version; None if it is not installed."""
    if not triton.available():
        return None
    import triton as installed

    return str(installed.__version__)


def main() -> None:
    """Print the facts."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = backend.select(arguments.device)
    facts = {
        **device_facts(device),
        **bandwidths(device),
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "host_memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            "hostdev": hostdev.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "triton": triton_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
        },
    }
    text = json.dumps(facts, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
