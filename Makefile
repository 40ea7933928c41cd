# PYTHON is the interpreter for a new .venv (3.10 to 3.13).  TORCH is pip's requirement for PyTorch.
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

setup: $(STAMP)  ## build .venv, or update it after a change of setup.py (PYTHON= sets the interpreter, TORCH= the PyTorch version)

# pip 24.1 and later refuse the omegaconf that fairseq 0.12.2 (Python 3.10) requires.
# fairseq 0.12.2 is built in isolation, because a build that finds torch needs sources that are missing from the release.
# fairseq-fixed (Python 3.11 and later) imports torch in its build; an isolated build would download torch again.
# eflomal may fail to build, because it needs OpenMP, which some compilers lack.
$(STAMP): setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install 'pip<24.1'
	$(BIN)/python -m pip install '$(TORCH)' numpy cython setuptools wheel
	@echo
	@echo "Installing fairseq and other packages. If fairseq has no wheel for this Python, compiling it takes two to five minutes."
	@echo
	$(BIN)/python -m pip install --no-deps 'fairseq==0.12.2; python_version < "3.11"'
	$(BIN)/python -m pip install --no-build-isolation --editable '.[demo,dev,docs,export,plots,rouge,serve]'
	$(BIN)/python -m pip install --no-build-isolation eflomal || echo "eflomal was not installed; only fairseq-plugins lexicon needs it."
	@touch $@

# The script reads ARCH and VOCAB_SELECTION from the environment.
demo: setup  ## train and score a small model, and draw its attention, in 5 to 10 minutes (ARCH=, VOCAB_SELECTION=1)
	examples/quickstart/run.sh

# Each worker uses one torch thread: the tests' tensors are small, and more threads would compete for cores.  Some tests
# wait, so three workers share two cores.
FAST_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile \
	--no-loadscope-reorder -m 'not slow'

test: setup check  ## check lint and types, and run all tests except slow ones (PYTEST_ARGS= adds options of pytest)
	$(FAST_TESTS) $(PYTEST_ARGS)

# nox creates an environment for each Python, such as .nox/3.10. With pyenv: PYENV_VERSION=3.10.13:3.11.7:3.12.1:3.13.0 make test-matrix
test-matrix: setup  ## run make test on each installed Python from 3.10 to 3.13, and with the oldest supported PyTorch
	$(BIN)/nox

fuzz: setup  ## test INPUTS= hostile options and files of each kind (default: 100 000, which take a quarter of an hour)
	OMP_NUM_THREADS=1 FUZZ_INPUTS=$(INPUTS) $(BIN)/python -m pytest tests/fuzz --durations=0 $(PYTEST_ARGS)

faults: setup  ## for each family, kill and resume a training 20 times, and compare it with an uninterrupted training
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.faults

searches: setup  ## compare SEARCHES= random searches with fairseq's (default: 10 000, which take a quarter of an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.searches $(SEARCHES)

# Coverage includes the commands that tests start (see pyproject.toml).
coverage: setup  ## measure which lines the tests run, without slow tests
	$(FAST_TESTS) --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

# mutmut changes copies of the files, in mutants/, and resumes a stopped run.  MUTANTS='fairseq_plugins.weighted_transformer.branches*'
# selects files; `.venv/bin/mutmut show NAME` shows a surviving mutant.
mutants: setup  ## list small changes of the code that no test notices (takes hours)
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(MUTANTS)
	$(BIN)/mutmut results

check: lint types  ## check lint and types

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

format: setup  ## format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup  ## compare the speed of training and decoding with fairseq's, and time the encoders of Gehring et al. 2016
	$(BIN)/python examples/benchmarks/generation.py
	$(BIN)/python examples/benchmarks/training.py
	$(BIN)/python examples/benchmarks/conv_encoder.py

# NEWSTEST=test.en.gz is the English side of newstest2014, for machines without network.
figures: setup  ## measure the ratios on the pages (25 to 40 minutes), and compare them with the previous ratios of this kind of machine
	-$(BIN)/python -m pip install --quiet ctranslate2
	$(BIN)/python examples/benchmarks/figures.py $(if $(NEWSTEST),--input $(NEWSTEST))

# Each build starts from scratch, because a change of the navigation changes every page.
site: setup  ## build the pages as a site with search, build/site/index.html; a broken link is an error
	$(BIN)/sphinx-build -W --keep-going --quiet --fresh-env -c docs . build/site
	@echo build/site/index.html

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist mutants *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
