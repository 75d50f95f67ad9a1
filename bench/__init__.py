"""Benchmarks, one claim each: `python -m bench` lists them, and `python -m bench NAME` runs one."""

import hostdev.core.environment  # noqa: F401  (before torch, as in a training process)
