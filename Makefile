# Each target makes the virtual environment by itself, once, and then needs no network.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test test-mlx test-pages test-long lint docs bench speedrun setup parity clean help

# A relative path: folder names with spaces would break a prerequisite, never a relative one.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
PYTHON ?= python3
# pip install with progress, and errors of one line.
INSTALL = $(PYTHON) tools/set_up.py $(VENV)

help:
	@echo "make demo   train a small CLIP on synthetic images and show what it finds (6 minutes at most, and once the set-up)"
	@echo "make setup  the virtual environment .venv alone, with the tools for tests and the pretrained towers"
	@echo "make test   ruff, mypy, import-linter, bandit, pytest, and which fraction of each package the tests execute"
	@echo "make docs   the site in site/, from docs/; fails for a broken link"
	@echo "make test-mlx  installs the extra mlx and compares training in MLX with torch"
	@echo "make test-long  kills, full disks, hostile files and fuzzing with large counts, on all cores, and a soak of an hour"
	@echo "make test-pages  the web pages in a real browser (installs Playwright; needs a Chromium)"
	@echo "make test-export  exported models in transformers.js, Chromium, sentence-transformers, Core ML's tools and Immich (IMMICH=its machine-learning folder)"
	@echo "make bench  speed as ratios against baselines, on this machine (DATA=folder: loaders too; PEERS=python: open_clip too)"
	@echo "make speedrun DATA=folder   repeat an entry of docs/speedrun.md: recall after ten minutes, three seeds (ENTRY=name)"
	@echo "make parity PEERS=python  features against installed open_clip and transformers, both directions"
	@echo "make clean  remove the virtual environment"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "m1clip needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up $(VENV): once, a few minutes; the download of torch is the largest part"
	@$(INSTALL) "m1clip and torch" -e .
	@touch $@

# With the pretrained towers, which the default recipe trains on. Made again when this list changes.
$(DEV): $(READY) Makefile
	@$(INSTALL) "tools for tests, and pretrained towers" -e '.[dev,data,remote,plot,export,search,towers]'
	@touch $@

setup: $(DEV)

demo: $(READY)
	@$(BIN)/m1clip demo

lint: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/bandit -q -c pyproject.toml -r m1clip & bandit=$$!; $(BIN)/mypy && wait $$bandit

# One worker more than there are cores: many tests wait for processes that they have started.
# Compiled modules are kept, even if the environment says not to: each worker and process would compile
# all tests and modules again.
test: export PYTHONDONTWRITEBYTECODE =
WORKERS := $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
test: lint
	@$(BIN)/python -m slipcover --source m1clip --json --out .coverage.json -m pytest -n $(WORKERS) --dist worksteal $(PYTEST)
	@$(BIN)/python tests/package_coverage.py .coverage.json

# The site, without the network. NO_MKDOCS_2_WARNING: an advertisement of the theme.
docs: $(READY)
	@$(INSTALL) "tools for the site" -e '.[docs]'
	@$(BIN)/python tools/reference.py --check
	@NO_MKDOCS_2_WARNING=1 OFFLINE=true $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "written: site/index.html"

test-mlx: $(DEV)
	@$(INSTALL) "MLX" -e '.[mlx]'
	@$(BIN)/pytest tests/training/test_mlx.py $(PYTEST)

test-pages: $(DEV)
	@$(INSTALL) "Playwright" playwright
	@$(BIN)/pytest -rs tests/web $(PYTEST)

# Writes docs/results/reliability.json and the table of docs/reliability.md.
test-long: $(DEV)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal --long --record -m long

# Exported folders in the programs that they are for; a program that cannot be installed is reported as skipped.
# IMMICH: machine-learning/ of Immich's repository. MODEL, PHOTO: a run and an image instead of a tiny model and noise.
NODE := $(VENV)/node
test-export: $(DEV)
	@mkdir -p $(NODE)
	@npm install --prefix $(NODE) --ignore-scripts --no-audit --no-fund --silent @huggingface/transformers@4 @huggingface/tokenizers onnxruntime-web || echo "not installed: transformers.js (npm)"
	@$(INSTALL) "Playwright" playwright || echo "not installed: Playwright"
	@$(INSTALL) "coremltools" -e '.[coreml]' || echo "not installed: coremltools"
	@$(PYTHON) -m venv $(VENV)/sentence-transformers && $(VENV)/sentence-transformers/bin/pip install --quiet -c constraints.txt sentence-transformers onnxruntime pillow || echo "not installed: sentence-transformers"
	@test -z "$(IMMICH)" || { $(PYTHON) -m venv $(VENV)/immich && $(VENV)/immich/bin/pip install --quiet fastapi python-multipart gunicorn uvicorn pydantic-settings opencv-python-headless orjson huggingface_hub onnxruntime tokenizers rich pillow; } || echo "not installed: what Immich needs"
	@NODE_FOLDER=$(NODE) IMMICH="$(IMMICH)" IMMICH_PYTHON=$(VENV)/immich/bin/python SENTENCE_TRANSFORMERS_PYTHON=$(VENV)/sentence-transformers/bin/python MODEL="$(MODEL)" PHOTO="$(PHOTO)" $(BIN)/pytest -rs tests/export

# PEERS: the Python of an environment with open_clip and transformers (benchmarks/README.md). DATA: a set of images.
bench: $(READY)
	@$(BIN)/python benchmarks/step.py --json docs/results/step.json
	@$(BIN)/python benchmarks/same_work.py --peers "$(PEERS)" --data "$(DATA)" --json docs/results/same_work.json
	@test -z "$(DATA)" || $(BIN)/python benchmarks/loader.py "$(DATA)" --peer-python "$(PEERS)" --json docs/results/loader.json
	@for name in large_batch memory; do $(BIN)/python benchmarks/$$name.py --json docs/results/$$name.json || exit 1; done
	@$(BIN)/python tools/results_table.py

# ENTRY: a name in docs/speedrun.md.
ENTRY ?= m1clip
speedrun: $(READY)
	@test -n "$(DATA)" || { echo "make speedrun DATA=folder [ENTRY=name] [PEERS=python]"; exit 1; }
	@$(BIN)/python benchmarks/speedrun.py "$(DATA)" --entry $(ENTRY) --peer-python "$(PEERS)"

# PEERS: a Python that has open_clip, torchvision and transformers (benchmarks/README.md).
parity: $(READY)
	@test -n "$(PEERS)" || { echo "make parity PEERS=python: a Python with open_clip, torchvision and transformers"; exit 1; }
	@$(BIN)/python tests/parity/compare.py "$(PEERS)" --json docs/results/parity.json

clean:
	rm -rf $(VENV)
