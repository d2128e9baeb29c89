# Every target sets itself up: `make demo` and `make test` work on a fresh clone with Python 3.12.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Beside it: one with the CUDA plugin of jax, which in $(VENV) would look for a GPU in every process and say on
# stderr that there is none; one with the oldest jax that is served.
VENV_GPU := .venv-gpu
VENV_OLDEST := .venv-oldest
OLDEST_JAX := 0.11.2

.PHONY: demo test test-slow test-fast test-kernels-oldest check check-gpu bench test-gpu clean

# A venv in the folder $(1), unless it is there; nothing in it is the repository's.
define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
  { echo "jaxinfer needs Python 3.12 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Say: make PYTHON=python3.12" >&2; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
@echo '*' > $(1)/.gitignore
endef
PIP := -m pip install --quiet --disable-pip-version-check

# The stamp depends on pyproject.toml, so changed dependencies install again.
$(VENV)/.installed-%: pyproject.toml
	$(call environment,$(VENV))
	@echo "installing jaxinfer ($*) into $(VENV)" >&2
	@$(BIN)/python $(PIP) --editable '.$(if $(filter dev,$*),[dev])'
	@touch $@

$(VENV_GPU)/.installed: pyproject.toml
	$(call environment,$(VENV_GPU))
	@echo "installing jaxinfer and the CUDA plugin of jax into $(VENV_GPU)" >&2
	@$(VENV_GPU)/bin/python $(PIP) --editable '.[gpu-check]' pytest pytest-timeout hypothesis
	@touch $@

$(VENV_OLDEST)/.installed: pyproject.toml
	$(call environment,$(VENV_OLDEST))
	@echo "installing jaxinfer and jax $(OLDEST_JAX) into $(VENV_OLDEST)" >&2
	@$(VENV_OLDEST)/bin/python $(PIP) --editable '.[dev]' 'jax==$(OLDEST_JAX)'
	@touch $@

demo: $(VENV)/.installed-run
	$(BIN)/jaxinfer pull smollm2-135m
	$(BIN)/jaxinfer generate smollm2-135m "Gravity is the force that" --max-tokens 64 --temperature 0

# In so many processes; a file's tests stay together, for what they load once.
WORKERS ?= 2
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist loadfile

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow and not model" -n $(WORKERS) --dist loadfile

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_house.py

# Machine code for GPUs on a machine without one (gpu_check/), and that planted faults are found in it.
check-gpu: $(VENV_GPU)/.installed
	$(VENV_GPU)/bin/python -m gpu_check --jobs 2
	JAX_PLATFORMS=cpu $(VENV_GPU)/bin/python -m pytest tests/gpu_check

# The kernels on the oldest jax that pyproject.toml allows; `make test` runs them on the newest.
test-kernels-oldest: $(VENV_OLDEST)/.installed
	$(VENV_OLDEST)/bin/python -m pytest -m "not slow" tests/kernels

bench: $(VENV)/.installed-run
	$(BIN)/jaxinfer pull smollm2-135m
	$(BIN)/python -m benchmarks.cpu smollm2-135m

# For a machine with a CUDA GPU, on the device: every kernel's conformance, pages in place, the engine. With
# GPU_PYTHON=python3 by that Python, which must have jax, flax, pytest and their like, and nothing is installed.
GPU_PYTHON ?=
test-gpu: $(if $(GPU_PYTHON),,$(VENV)/.installed-dev)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu tests/gpu

clean:
	rm -rf $(VENV) $(VENV_GPU) $(VENV_OLDEST) build *.egg-info .pytest_cache .ruff_cache .hypothesis
