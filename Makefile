# The commands: make train, make test, make bench. Each sets up what it needs; only make and Python are required.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CRITEO ?=
ARGS ?=

.PHONY: train test test-device test-slow bench bench-peers device-report docs lint types unit wheel venv clean

train: $(VENV)/.ready
	@$(BIN)/python -m hostdev.train.quickstart $(if $(CRITEO),--criteo "$(CRITEO)") $(ARGS)

test: lint types docs unit test-device wheel

# Two tests at a time. Torch's threads of one must not spin while they wait: the other's would have no core.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal --durations 25

# On a simulated accelerator, in a process of its own: it is registered with torch for the whole process.
ON_DEVICE := $(PYTEST) -p tests.standin.plugin

test-device: $(VENV)/.ready
	$(ON_DEVICE) -m "device and not slow"

test-slow: $(VENV)/.ready
	$(BIN)/python tests/smoke_wheel.py --alone
	$(PYTEST) -m slow
	$(ON_DEVICE) -m "device and slow"
	$(ON_DEVICE) -m "device and (not slow or slow_on_standin)" --standin-schedule eager
	$(ON_DEVICE) -m "device and (not slow or slow_on_standin)" --standin-schedule random
	$(ON_DEVICE) -m "device and (not slow or slow_on_standin)" --standin-schedule delayed

bench: $(VENV)/.ready
	$(BIN)/python bench/bench_ops.py
	$(BIN)/python bench/bench_reader.py
	$(BIN)/python bench/bench_timing.py
	$(BIN)/python bench/bench_pool.py
	$(BIN)/python bench/bench_preprocess.py $(if $(CRITEO),--criteo "$(CRITEO)")
	$(BIN)/python bench/bench_cache.py
	$(BIN)/python bench/bench_pipeline.py
	$(BIN)/python bench/bench_device.py
	$(BIN)/python bench/bench_loop.py --no-peers
	$(BIN)/python bench/bench_checkpoint.py
	$(BIN)/python bench/bench_open.py
	$(BIN)/python bench/bench_ranks.py

bench-peers: $(VENV)/.ready
	$(BIN)/python bench/bench_peers.py
	$(BIN)/python bench/bench_loop.py

device-report: $(VENV)/.ready
	$(BIN)/python bench/device_report.py $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

unit: $(VENV)/.ready
	$(PYTEST) -m "not slow"

wheel: $(VENV)/.ready
	$(BIN)/python tests/smoke_wheel.py

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hostdev needs Python 3.11 or newer, not %d.%d; run make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .peers build dist *.egg-info
