# Everything here sets up its own .venv from python3 and pip when it is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Three files of tests at a time, as some mostly wait, in the order that tests/conftest.py gives them;
# one thread each, as the models are too small to gain by two.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder \
	--durations 40 --junitxml build/tests.xml

.DEFAULT_GOAL := help
.PHONY: help demo check test gpu drills goldens fuzz reference screenshots clean

help:  ## what there is to make
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(READY)  ## train a small text-to-video model and look at what it makes (minutes; runs/demo)
	$(BIN)/longtake demo $(DEMO)

test: check  ## all checks, then all tests (minutes; build/tests.xml has the result of each)
	$(PYTEST) -m 'not drill'

drills: $(READY)  ## every fault of `longtake drill`, then several hosts and Slurm (an hour; the latter as root)
	OMP_NUM_THREADS=1 $(BIN)/longtake drill --all
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m drill --timeout 900 --durations 40

check: $(READY)  ## format, lint, types, the import contract and limits of structure (half a minute)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.structure --check

# On a machine with an environment of its own, as its torch: make gpu PY=python3
PY ?= $(BIN)/python

gpu: $(if $(filter $(BIN)/python,$(PY)),$(READY))  ## tests and measurements on a CUDA GPU in eight minutes (benchmarks/results/gpu_*.md)
	PYTHONPATH=src:.$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY) -W ignore benchmarks/gpu.py

goldens: $(READY)  ## compare results with those of an earlier commit (GOLDENS="--only one-rank"; CONTRIBUTING.md)
	$(BIN)/python -m tests.goldens compare $(GOLDENS)

# Another seed each time; repeat one with: make fuzz LONGTAKE_FUZZ_SEED=…
LONGTAKE_FUZZ_SEED  ?= $(shell date +%s)
LONGTAKE_FUZZ_CASES ?= 2000

fuzz: $(READY)  ## hostile inputs for every command, and random histories of the data; new ones each time (half an hour)
	@echo LONGTAKE_FUZZ_SEED=$(LONGTAKE_FUZZ_SEED) LONGTAKE_FUZZ_CASES=$(LONGTAKE_FUZZ_CASES)
	LONGTAKE_FUZZ_SEED=$(LONGTAKE_FUZZ_SEED) LONGTAKE_FUZZ_CASES=$(LONGTAKE_FUZZ_CASES) \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests/fuzz

reference: $(READY)  ## write docs/reference from the code
	$(BIN)/python -m docs.reference.generate

screenshots: demo  ## take the pictures of the board in docs/ of the demo's run, in Chromium
	LONGTAKE_SCREENSHOT_RUNS=runs $(BIN)/python -m pytest -q tests/board -k pictures_of_the_documentation

clean:  ## remove the virtual environment and every cache (runs stay)
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .goldens

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longtake needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
