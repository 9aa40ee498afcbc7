# Each target makes the virtual environment by itself, once, and then needs no network.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test lint bench setup clean help

# A relative path: folder names with spaces would break a prerequisite, never a relative one.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTHON ?= python3

help:
	@echo "make demo   train a small CLIP on synthetic pictures and show what it finds (about 5 minutes)"
	@echo "make test   ruff, mypy, import-linter, pytest"
	@echo "make bench  speed as ratios against baselines, on this machine (DATA=folder: loaders too)"
	@echo "make clean  remove the virtual environment"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "m1clip needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once, a few minutes) ..."
	@$(PIP) -e .
	@touch $@

$(DEV): $(READY)
	@echo "adding the tools for tests (once) ..."
	@$(PIP) -e '.[dev,data]'
	@touch $@

setup: $(DEV)

demo: $(READY)
	@$(BIN)/m1clip train --preset demo

lint: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

test: lint
	@$(BIN)/pytest -n auto

bench: $(READY)
	@$(BIN)/python benchmarks/synthetic.py
	@$(BIN)/python benchmarks/step.py --json docs/results/step.json
	@test -z "$(DATA)" || $(BIN)/python benchmarks/loader.py "$(DATA)" --json docs/results/loader.json

clean:
	rm -rf $(VENV)
