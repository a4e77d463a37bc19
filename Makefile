# The same commands for people and for CI. All they need is Python (3.10 or newer) with venv.
#
#   make demo    see it work             make test    run the tests (ARGS="-n 0 tests/flow" to choose)
#   make check   style, types, floors    make format  bring the files into the house style
#   make bench   measure (BENCH="...")   make clean   remove what these commands made
#   make chaos   kill 200 workers in some minutes, and see that no batch is lost
#
# PYTHON chooses the interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BENCH ?=
DEMO ?=
CHAOS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PATHS := $(wildcard src tests benchmarks examples)

.PHONY: help install demo test chaos check lint types floors news house bench format clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

install: $(STAMP)

# torch first and alone: the open range in pyproject.toml would fetch gigabytes of a newer one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "forebay needs Python 3.10 or newer; '$(PYTHON)' is older or missing. Try: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	    || { echo "No virtual environment could be made. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV): torch first (a minute or two), then forebay."
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[demo,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/forebay demo $(DEMO)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos.run $(CHAOS)

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(BENCH)

check: style lint types floors news house

style: $(STAMP)
	$(BIN)/ruff format --check $(PATHS)

lint: $(STAMP)
	$(BIN)/ruff check $(PATHS)

types: $(STAMP)
	$(BIN)/mypy

floors: $(STAMP)
	$(BIN)/lint-imports --no-logo

# Fragments must have legal names and render. Nothing is written.
news: $(STAMP)
	@$(BIN)/towncrier build --draft --version next > /dev/null && echo "changelog fragments: fine"

# The architecture, and the pages: snippets run, and what shell lines name exists. Prints what grew long.
house: $(STAMP)
	$(BIN)/python -m tests.house.sizes
	$(BIN)/python -m pytest -q -n 0 tests/house

format: $(STAMP)
	$(BIN)/ruff check --fix-only $(PATHS)
	$(BIN)/ruff format $(PATHS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build forebay-demo
