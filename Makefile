# Every target sets itself up: `make demo` and `make test` work on a fresh clone with Python 3.12.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-fast check bench test-gpu clean

# The stamp depends on pyproject.toml, so changed dependencies install again.
$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "jaxinfer needs Python 3.12 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Say: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing jaxinfer ($*) into $(VENV)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(if $(filter dev,$*),[dev])'
	@touch $@

demo: $(VENV)/.installed-run
	$(BIN)/jaxinfer pull smollm2-135m
	$(BIN)/jaxinfer generate smollm2-135m "Gravity is the force that" --max-tokens 64 --temperature 0

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow and not model"

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_house.py

bench: $(VENV)/.installed-run
	$(BIN)/jaxinfer pull smollm2-135m
	$(BIN)/python -m benchmarks.cpu smollm2-135m

# For a machine with a CUDA GPU (install '.[cuda13,dev]' first): the kernels' conformance suite on the device.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/kernels

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
