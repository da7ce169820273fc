# Two commands matter: `make run` sets up and runs the main job, `make test` sets up and runs all tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test test-all test-fast lint format clean

run: $(VENV)/.runtime
	$(BIN)/comlrl init
	$(BIN)/comlrl run

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not endurance" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -m "" $(ARGS)

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name it with make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,gguf]'
	touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
