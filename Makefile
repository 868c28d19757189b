# Every target makes its own virtual environment from nothing but Python 3.11 or newer.
#
#   make demo      train a byte-level GPT on Python's own sources: 8 virtual CPU devices, 2 data x 4 pipeline, 1F1B
#   make check     style, layers, types and the tests that need no JAX (under a minute)
#   make test      the default suite (about ten minutes on two cores)
#   make test-all  the whole support matrix; writes docs/support-matrix.md
#
# PYTHON=... chooses the interpreter, VENV=... the folder, WORKERS=... the test processes, ARGS=... extra arguments.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
WORKERS ?= 2
ARGS ?=
CANDIDATES := python3.11 python3.12 python3.13 python3 python
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0

.PHONY: help demo check test test-all clean

help:
	@sed -n '3,8s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.stamp-run
	$(VENV)/bin/piper train configs/gpt_stdlib.yaml $(ARGS)

check: $(VENV)/.stamp-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --cache-dir .cache/import_linter
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(PYTEST) --core -m "not full" $(ARGS)

test: $(VENV)/.stamp-test
	$(PYTEST) -m "not full" $(ARGS)

test-all: $(VENV)/.stamp-test
	$(PYTEST) $(ARGS)

clean:
	rm -rf $(VENV) .cache build dist

# -- environments -------------------------------------------------------------------------------------
$(VENV)/bin/python:
	@for candidate in $(or $(PYTHON),$(CANDIDATES)); do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$candidate ($$($$candidate --version))"; \
	    exec $$candidate -m venv $(VENV); \
	  fi; \
	done; \
	echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1

$(VENV)/.stamp-run: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.stamp-test: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.stamp-run

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.stamp-run $(VENV)/.stamp-test
