# make chat        environment, packages, the default model, and a conversation with it (MODEL=... for another)
# make test        the same environment with the development tools: lint, types, tests; under 15 minutes on two cores
# make check-full  everything, the slow tests too
# make bench       how fast the model runs here (MODEL=... for another, BENCH="--peer --json" for more)
# make clean       remove the environment

VENV := .venv
BENCH :=
MODEL :=
# The first of these that is Python 3.11 or later.
PYTHON := $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo "$$python"; break; fi; done)
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: chat test check-full bench environment lint clean

chat: $(VENV)/.installed
	$(BIN)/kinetic pull $(MODEL)
	$(BIN)/kinetic chat $(MODEL)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

check-full: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/kinetic bench $(MODEL) $(BENCH)

environment: $(VENV)/.installed-dev

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or later is needed; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || uv venv --seed --clear --python $(PYTHON) $(VENV)

$(VENV)/.installed: $(PROJECTS) | $(BIN)/python
	@echo "installing packages …"
	$(PIP) -e . $(PLUGINS:%=-e %)
	@touch $@

$(VENV)/.installed-dev: $(PROJECTS) | $(BIN)/python
	@echo "installing packages and development tools …"
	$(PIP) -e ".[dev]" $(PLUGINS:%=-e %)
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
