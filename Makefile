# Everything here works on a machine with Python 3.10 or newer and make.
#
#   PYTHON    the interpreter the environments are made with
#   PIP_ARGS  added to every pip install, e.g. to name an index that serves torch's CPU build
#   VENV      where the environment lives
#   REMOTE    arguments of .ci/remote_env.py, e.g. "--python 3.12 --build host cuda:sm_90"

PYTHON   ?= python3
PIP_ARGS ?=
VENV     ?= .venv
REMOTE   ?=
OLDEST   ?= .venv-oldest

BIN     := $(VENV)/bin
PIP     := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
INPUTS  := pyproject.toml setup.py constraints.txt
OLDEST_TORCH := 2.7.1

.DEFAULT_GOAL := help
# Two pips in one environment at the same time break it.
.NOTPARALLEL:
.PHONY: help demo test full lint types kernels-host kernels-cuda kernels-musa sanitize fuzz wheel remote-env clean

help:
	@echo "make demo    install the command-line tool and compare FP8 recipes with BF16"
	@echo "make test    the quick test suite"
	@echo "make full    every test, the core ones under torch $(OLDEST_TORCH), kernels under sanitizers; writes benchmarks/results/full.json"
	@echo "make lint    ruff: rules and formatting"
	@echo "make types   mypy, strict, over the whole package"
	@echo "make wheel   source archive and wheel in dist/"
	@echo "make kernels-host, kernels-cuda, kernels-musa  the kernel library of a target, in the user's cache"
	@echo "make sanitize  the tests of the kernels, on the host library's build with the sanitizers"
	@echo "make fuzz    a minute of random calls of every kernel entry, under the address sanitizer"
	@echo "make remote-env  a folder with which the checkout runs on a machine without a package index"
	@echo "make clean   remove build products and caches; the environments stay"

demo: $(VENV)/.installed-cli
	$(BIN)/te-hal compare

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q

full: $(VENV)/.installed-test $(OLDEST)/.installed-test
	$(BIN)/python .ci/full.py --oldest $(OLDEST)/bin/python

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The command-line tool's libraries are needed here too: without them mypy checks less than it seems to.
types: $(VENV)/.installed-test $(VENV)/.installed-dev
	$(BIN)/python .ci/check_types.py

wheel: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

kernels-host kernels-cuda kernels-musa: kernels-%: $(VENV)/.installed-test
	$(BIN)/python -m te_hal.ffi.build --target $*

sanitize: $(VENV)/.installed-test
	$(BIN)/python .ci/sanitized.py -q -n 2

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m slow tests/ffi/test_fuzz.py

remote-env: $(VENV)/.installed-test
	$(BIN)/python .ci/remote_env.py $(REMOTE)

clean:
	rm -rf build dist out .remote *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per extra; an edited input installs again.
$(VENV)/.installed-%: $(INPUTS) | $(VENV)/bin/python
	$(BIN)/python $(PIP) -c constraints.txt -e '.[$*]'
	@touch $@

$(OLDEST)/bin/python:
	$(PYTHON) -m venv $(OLDEST)

# The same pins but torch's own, and what torch brings along in versions of its choice.
$(OLDEST)/.installed-test: $(INPUTS) | $(OLDEST)/bin/python
	grep -v '^torch==' constraints.txt > $(OLDEST)/constraints.txt
	echo 'torch==$(OLDEST_TORCH)' >> $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python $(PIP) -c $(OLDEST)/constraints.txt -e '.[test]'
	@touch $@
