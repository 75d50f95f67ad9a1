# The commands: make train, make test, make bench. Each sets up what it needs; only make and Python are required.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CRITEO ?=
ARGS ?=

# Modules are installed as sources. If an image forbids to write bytecode, each process would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-cpu test-fast test-processes test-device test-slow bench bench-peers device-report checks docs lint types kernels wheel venv clean

train: $(VENV)/.ready
	@$(BIN)/python -m hostdev.train.quickstart $(if $(CRITEO),--criteo "$(CRITEO)") $(ARGS)

# The rungs, the quickest first. Each test is in one of them. What waits for no test runs beside those that wait most.
test: $(VENV)/.ready
	@$(MAKE) --no-print-directory --jobs 2 kernels
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory --jobs 2 test-cpu types docs
	@$(MAKE) --no-print-directory --jobs 2 test-device wheel

# Two tests at a time. Torch's threads of one must not spin while they wait: the other's would have no core.
# All durations are in durations; `python -m tests.durations` prints the slowest.
PYTEST = HOSTDEV_DURATIONS=$@ OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal

# The tests of the first rung: kernels, core, and the contracts of tables, data and the runtime.
FAST := tests/host \
	$(filter-out tests/kernels/test_cached.py,$(wildcard tests/kernels/test_*.py)) \
	$(filter-out tests/core/test_interrupts.py tests/core/test_launched.py,$(wildcard tests/core/test_*.py)) \
	$(filter-out tests/models/test_training.py tests/models/test_twins.py,$(wildcard tests/models/test_*.py)) \
	tests/cache/test_directory.py tests/cache/test_slots.py tests/checkpoint/test_files.py tests/checkpoint/test_open.py \
	tests/checkpoint/test_snapshot.py tests/checkpoint/test_untrusted.py \
	tests/data/test_manifest.py tests/data/test_reader.py tests/data/test_table.py \
	tests/data/test_table_errors.py tests/data/test_table_errors_typed.py tests/data/test_table_text.py \
	tests/device/test_backend.py tests/device/test_device.py tests/device/test_rows.py \
	tests/runtime/test_close.py tests/runtime/test_features.py tests/runtime/test_lookup.py \
	tests/runtime/test_not_finite.py tests/runtime/test_refused.py tests/runtime/test_table_optimizer.py \
	tests/test_bench.py tests/test_kernel_checks.py tests/test_mutations.py tests/test_pipeline_queues.py tests/test_metrics.py tests/test_packaging.py \
	tests/test_primitive.py tests/test_scores.py

test-fast: lint
	$(PYTEST) -m "not slow" $(FAST)

# Everything else on the CPU: whole trainings, commands, several processes, changed files.
test-processes: $(VENV)/.ready
	$(PYTEST) -m "not slow" $(FAST:%=--ignore=%)

# Both, the fast ones first, with one start of pytest's workers.
test-cpu: $(VENV)/.ready
	$(PYTEST) -m "not slow" $(FAST) tests

# On a simulated accelerator, in a process of its own: it is registered with torch for the whole process.
ON_DEVICE = $(PYTEST) -p tests.standin.plugin
# The files with a function that takes `device`; tests/device/test_faults.py checks that these are all.
DEVICE_TESTS := $(shell grep -rlE 'def [a-z_0-9]+\([^)]*\bdevice\b' tests --include='test_*.py')

test-device: $(VENV)/.ready
	$(ON_DEVICE) -m "device and not slow" $(DEVICE_TESTS)

# Another Python than this one, for the fast tests: its name, its path, or "none".
OTHER_PYTHON ?= python3.13

# Python itself starts each process here, which the quick rungs fork (tests/forks.py).
# The whole takes hours: each part is a target too, and the whole runs all of them before it says which failed.
# The slow tests on the CPU by folder, as all of them take hours; `others` has the tests of all other folders.
FOLDERS_tables := cache checkpoint core host kernels models modes runtime
FOLDERS_data := data
FOLDERS_ranks := distributed parallel
FOLDERS_fuzz := fuzz
SLOW := wheel tables data ranks fuzz others processes device eager random delayed lowest python
SLOW_PARTS := $(SLOW:%=test-slow-%)
.PHONY: $(SLOW_PARTS)
$(SLOW_PARTS): export HOSTDEV_TESTS_EXEC := 1

test-slow: $(VENV)/.ready
	@$(MAKE) --no-print-directory --keep-going $(SLOW_PARTS)

test-slow-wheel: $(VENV)/.ready
	$(BIN)/python tests/smoke_wheel.py --alone

IN_PARTS := tables data ranks fuzz
$(IN_PARTS:%=test-slow-%): test-slow-%: $(VENV)/.ready
	$(PYTEST) -m slow $(FOLDERS_$*:%=tests/%)

test-slow-others: $(VENV)/.ready
	$(PYTEST) -m slow $(foreach part,$(IN_PARTS),$(FOLDERS_$(part):%=--ignore=tests/%))

test-slow-processes: $(VENV)/.ready
	$(PYTEST) -m "not slow" $(FAST:%=--ignore=%)

test-slow-device: $(VENV)/.ready
	$(ON_DEVICE) -m "device and slow" $(DEVICE_TESTS)

test-slow-eager test-slow-random test-slow-delayed: test-slow-%: $(VENV)/.ready
	$(ON_DEVICE) -m "device and (not slow or slow_on_standin or not_drawn)" --standin-schedule $* $(DEVICE_TESTS)

test-slow-lowest: $(VENV)/.ready
	$(BIN)/python tests/versions.py --lowest $(FAST)

test-slow-python: $(VENV)/.ready
	$(BIN)/python tests/versions.py --python $(OTHER_PYTHON) $(FAST)

bench: $(VENV)/.ready
	$(BIN)/python -m bench --all $(if $(CRITEO),--criteo "$(CRITEO)")

bench-peers: $(VENV)/.ready
	$(BIN)/python -m bench peers
	$(BIN)/python -m bench loop

device-report: $(VENV)/.ready
	$(BIN)/python -m bench report $(ARGS)

# Each takes one core, and so two at a time.
checks: $(VENV)/.ready
	@$(MAKE) --no-print-directory --jobs 2 types docs kernels

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Compiled once here, and not by two tests at the same time.
kernels: kernels-others kernels-optimizers kernels-8-bits kernels-every-row

kernels-%: $(VENV)/.ready
	$(BIN)/python -m tests.compile_kernels $*

wheel: $(VENV)/.ready
	$(BIN)/python tests/smoke_wheel.py

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hostdev needs Python 3.11 or newer, not %d.%d; run make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .peers build dist *.egg-info
