# PYTHON is the interpreter for a new .venv (3.10 to 3.13), TORCH the requirement for PyTorch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
INPUTS ?= 100000
SEARCHES ?= 10000

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Scripts in examples/ call fairseq's commands by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup demo test test-matrix coverage mutants faults fuzz searches check lint types format bench figures site clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## build .venv once (PYTHON=python3.12: another interpreter, TORCH=: another PyTorch)

# pip 24.1 and later refuse the omegaconf that fairseq 0.12.2 (Python 3.10) requires.
# fairseq 0.12.2 is built in isolation: if its build finds torch, it needs sources that are missing from the release.
# fairseq-fixed (Python 3.11 and later) is not: its build imports torch, and would download it again in isolation.
# eflomal is compiled with OpenMP, which some compilers lack.
$(STAMP): setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install 'pip<24.1'
	$(BIN)/python -m pip install '$(TORCH)' numpy cython setuptools wheel
	@echo
	@echo "Installing fairseq and other packages. Compiling fairseq, if it has no wheel, takes two to five minutes."
	@echo
	$(BIN)/python -m pip install --no-deps 'fairseq==0.12.2; python_version < "3.11"'
	$(BIN)/python -m pip install --no-build-isolation --editable '.[demo,dev,docs,export,plots,rouge,serve]'
	$(BIN)/python -m pip install --no-build-isolation eflomal || echo "Only fairseq-plugins lexicon needs eflomal."
	@touch $@

# The script reads ARCH and VOCAB_SELECTION from the environment.
demo: setup  ## train and score a small model, and draw its attention, in 5 to 10 minutes (ARCH=, VOCAB_SELECTION=1)
	examples/quickstart/run.sh

# One torch thread per worker: the tests' tensors are small, and workers would compete for cores.
FAST_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
	--no-loadscope-reorder -m 'not slow'

test: setup check  ## lint, types and tests, except slow ones (PYTEST_ARGS= adds options)
	$(FAST_TESTS) $(PYTEST_ARGS)

# Each Python has its own environment, such as .nox/3.10. With pyenv: PYENV_VERSION=3.10.13:3.11.7:3.12.1:3.13.0 make test-matrix
test-matrix: setup  ## make test on each installed Python from 3.10 to 3.13, and with the oldest PyTorch
	$(BIN)/nox

fuzz: setup  ## test hostile options and files, INPUTS= of each kind (100 000 by default; a quarter of an hour)
	OMP_NUM_THREADS=1 FUZZ_INPUTS=$(INPUTS) $(BIN)/python -m pytest tests/fuzz --durations=0 $(PYTEST_ARGS)

faults: setup  ## kill and resume a training 20 times for each family, and compare with an uninterrupted one
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.faults

searches: setup  ## compare SEARCHES= random searches with fairseq's (10 000 by default; a quarter of an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.searches $(SEARCHES)

# Commands that tests start are measured, too (pyproject.toml).
coverage: setup  ## measure the lines that tests run, except slow ones
	$(FAST_TESTS) --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

# mutmut changes copies of the files in mutants/, and resumes a stopped run.  MUTANTS='fairseq_plugins.weighted_transformer.branches*'
# selects files; `.venv/bin/mutmut show NAME` shows a surviving mutant.
mutants: setup  ## list small changes of the code that no test notices (hours)
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(MUTANTS)
	$(BIN)/mutmut results

check: lint types  ## lint and types

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

format: setup  ## format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup  ## time training and decoding against fairseq, and the encoders of 2016
	$(BIN)/python examples/benchmarks/generation.py
	$(BIN)/python examples/benchmarks/training.py
	$(BIN)/python examples/benchmarks/conv_encoder.py

# NEWSTEST=test.en.gz for machines without network.
figures: setup  ## measure the ratios on the pages (20 minutes), and compare with the last ones of such a machine
	-$(BIN)/python -m pip install --quiet ctranslate2
	$(BIN)/python examples/benchmarks/figures.py $(if $(NEWSTEST),--input $(NEWSTEST))

# Each build starts from scratch, because a change of the navigation changes every page.
site: setup  ## build the pages as a site with search, build/site/index.html; a broken link is an error
	$(BIN)/sphinx-build -W --keep-going --quiet --fresh-env -c docs . build/site
	@echo build/site/index.html

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist mutants *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
