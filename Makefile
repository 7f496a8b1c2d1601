# Everything a newcomer needs: `make demo`, `make test`. Each sets up its own virtual environment first.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export JAX_PLATFORMS ?= cpu
# Threads of BLAS that wait by spinning slow each other and XLA down; the NumPy references need one.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help demo test test-slow parity lint bench clean
.DEFAULT_GOAL = help

help: ## List the commands.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v.major}.{v.minor} found, 3.11 or newer needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.parity: $(VENV)/.installed
	$(BIN)/pip install --quiet 'torch==2.13.0'
	$(BIN)/pip install --quiet --editable '.[dev,parity]'
	@touch $@

demo: $(VENV)/.installed ## Train a small model on real text, save, restore in a new process, generate.
	$(BIN)/python -m train demo
	$(BIN)/python -m infer generate --checkpoint runs/demo --prompt "In the beginning" --max-tokens 80 --cache fp8
	$(BIN)/python -m infer table --checkpoint runs/demo

lint: $(VENV)/.installed ## Formatting, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

test: lint ## Lint, types and the default tests.
	$(BIN)/pytest -n 2 -m "not slow and not parity"

test-slow: $(VENV)/.installed ## The longer tests: kills at random moments, full-size shapes.
	$(BIN)/pytest -m slow

parity: $(VENV)/.parity ## Live comparison with Hugging Face transformers.
	$(BIN)/pytest -m parity tests/parity

clean: ## Remove environments, caches and runs.
	rm -rf $(VENV) .cache runs
