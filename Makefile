# PYTHON is the interpreter that the virtual environment is made with; 3.10 or later.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help setup demo test bench lint

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##  */\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(INSTALLED)  ## make .venv: the package (editable, its native module compiled) and the tools of development

demo: setup  ## four workers on two local hosts; one is killed, a host leaves and comes back
	$(BIN)/python examples/demo.py

test: lint  ## lint, then all tests
	$(BIN)/python -m pytest tests

bench: setup  ## recovery and scale-up, commits and sync, each side by side with the bare thing
	$(BIN)/python tests/bench/bench_recovery.py
	$(BIN)/python tests/bench/bench_commit.py
	$(BIN)/python tests/bench/bench_sync.py

lint: setup  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The build requirements come first and pip builds with them: build isolation would fetch them again for each build.
$(INSTALLED): pyproject.toml setup.py constraints.txt CMakeLists.txt $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt setuptools cmake nanobind
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@
