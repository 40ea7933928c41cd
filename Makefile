# PYTHON chooses the interpreter of a new .venv (3.10 to 3.13); TORCH another PyTorch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
INPUTS ?= 100000
SEARCHES ?= 10000

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The scripts under examples/ call fairseq's commands by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup demo test test-matrix coverage mutants faults fuzz searches check lint types format bench site clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## build .venv once (PYTHON=python3.12 chooses the interpreter, TORCH= the PyTorch)

# pip: from 24.1 on it refuses the omegaconf that fairseq 0.12.2 (Python 3.10) asks for.
# fairseq 0.12.2 is built in isolation: where its build sees torch, it wants sources that were left out of the release.
# fairseq-fixed (from Python 3.11) is not: its build imports torch, and isolated it would download a second one.
# eflomal is compiled, with OpenMP, which not every compiler has.
$(STAMP): setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install 'pip<24.1'
	$(BIN)/python -m pip install '$(TORCH)' numpy cython setuptools wheel
	@echo
	@echo "Installing fairseq and the rest. Where there is no wheel of fairseq, compiling it takes two to five minutes."
	@echo
	$(BIN)/python -m pip install --no-deps 'fairseq==0.12.2; python_version < "3.11"'
	$(BIN)/python -m pip install --no-build-isolation --editable '.[demo,dev,docs,export,plots,rouge,serve]'
	$(BIN)/python -m pip install --no-build-isolation eflomal || echo "Only fairseq-plugins lexicon needs eflomal."
	@touch $@

# ARCH and VOCAB_SELECTION reach the script through the environment.
demo: setup  ## data, training, translation, scores and a picture in 5 to 10 minutes (ARCH=, VOCAB_SELECTION=1)
	examples/quickstart/run.sh

# One torch thread per worker: the tests' tensors are small, and workers would fight for the cores.
FAST_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
	--no-loadscope-reorder -m 'not slow'

test: setup check  ## lint, types and all but the slow tests (PYTEST_ARGS= adds options)
	$(FAST_TESTS) $(PYTEST_ARGS)

# Each in an environment of its own, .nox/3.10 and so on. With pyenv: PYENV_VERSION=3.10.13:3.11.7:3.12.1:3.13.0 make test-matrix
test-matrix: setup  ## make test on Python 3.10 to 3.13, as far as they are here, and with the oldest PyTorch
	$(BIN)/nox

fuzz: setup  ## hostile options and files, INPUTS= of each kind (100 000; a quarter of an hour)
	OMP_NUM_THREADS=1 FUZZ_INPUTS=$(INPUTS) $(BIN)/python -m pytest tests/fuzz --durations=0 $(PYTEST_ARGS)

faults: setup  ## kill training 20 times for each family, resume it, and compare with an undisturbed one
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.faults

searches: setup  ## compare SEARCHES= random searches with fairseq's, word by word (10 000; a quarter of an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.searches $(SEARCHES)

# The commands that tests start are measured too (pyproject.toml).
coverage: setup  ## which lines of the code the tests run, of all but the slow ones
	$(FAST_TESTS) --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

# It changes copies of the files, under mutants/, and goes on where it was stopped.  MUTANTS='fairseq_plugins.weighted_transformer.branches*'
# for some; `.venv/bin/mutmut show NAME` for what a survivor is.
mutants: setup  ## changes the code in hundreds of small ways, each alone, and lists those that no test notices (hours)
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(MUTANTS)
	$(BIN)/mutmut results

check: lint types  ## lint and types

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

format: setup  ## rewrite the code in the house's layout
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup  ## speed of training and decoding versus fairseq's own, and of the encoders of 2016
	$(BIN)/python examples/benchmarks/generation.py
	$(BIN)/python examples/benchmarks/training.py
	$(BIN)/python examples/benchmarks/conv_encoder.py

# From nothing each time: what is in the navigation stands on every page, also on those that have not changed.
site: setup  ## the pages as a site with search, build/site/index.html; a broken link is an error
	$(BIN)/sphinx-build -W --keep-going --quiet --fresh-env -c docs . build/site
	@echo build/site/index.html

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist mutants *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
