"""A plugin for pytest: python -m pytest -p tests.standin.plugin [--standin-schedule NAME] [--standin-seed N] ...

Registers the simulated accelerator before anything else, runs every test with it, and fails a test that leaves an error
on the device behind.
"""

import contextlib
import sys

import pytest
import torch

standin = sys.modules[__package__]


def pytest_addoption(parser):
    group = parser.getgroup("standin", "the simulated accelerator")
    group.addoption("--standin-schedule", choices=standin.SCHEDULES, default="lazy", help="when tasks run")
    group.addoption("--standin-seed", type=int, default=0, help="of the random schedules")


def pytest_configure(config):
    torch.set_num_threads(1)  # otherwise torch's threads and the streams' wait for each other
    _configure(config)


def pytest_report_header(config):
    options = config.option
    return f"standin: {standin.unavailable or f'{options.standin_schedule}, seed {options.standin_seed}'}"


def pytest_collection_modifyitems(items):
    if standin.unavailable is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=standin.unavailable))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    standin.counters.reset()
    try:
        result = yield
        standin.settle()
        return result
    finally:
        with contextlib.suppress(RuntimeError):  # from a test that failed
            standin.settle()
        _configure(item.config)


def _configure(config):
    if standin.unavailable is None:
        torch.accelerator.set_device_index(0)
        standin.configure(schedule=config.option.standin_schedule, seed=config.option.standin_seed, check=True)
