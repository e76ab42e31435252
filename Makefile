# make sweep and make test need Python >= 3.10 and g++; nvcc, where there is one, adds the CUDA backend.
#
#   VENV    the virtual environment, made when needed; empty: use PYTHON as it is and install nothing
#   PYTHON  the interpreter (default: python3)

VENV = .venv
PYTHON ?= python3
SWEEP_ARGS ?=
TEST_ARGS ?=

ifeq ($(strip $(VENV)),)
  PY = $(PYTHON)
  ENVIRONMENT =
else
  PY = $(VENV)/bin/python
  ENVIRONMENT = $(VENV)/.cute_kernels_installed
endif
PIP = $(PY) -m pip --disable-pip-version-check install --quiet
REQUIREMENTS = third_party/requirements.txt third_party/headers.txt third_party/cuda-headers.txt

# python/ comes first: the package in it, and not the C++ folder cute_kernels/, is what `import cute_kernels` means.
export PYTHONPATH := $(CURDIR)/python:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help build test sweep clean
.DEFAULT_GOAL := help

help:
	@echo "make test    build in place and run the tests (TEST_ARGS: more arguments for pytest)"
	@echo "make sweep   build in place and measure against the peers (SWEEP_ARGS: its arguments, such as --help)"
	@echo "make build   build the extension in place"
	@echo "make clean   remove what the build wrote"
	@echo "VENV=DIR     virtual environment to make and use (default: $(VENV)); 'VENV= PYTHON=python3' installs nothing"

build: $(ENVIRONMENT)
	$(PY) setup.py --quiet build_ext --inplace

test: build
	$(PY) -m pytest tests $(TEST_ARGS)

sweep: build
	$(PY) -m profiling.sweep $(SWEEP_ARGS)

# The stamp is written last, so an interrupted installation is taken up again.
$(VENV)/.cute_kernels_installed: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "cute_kernels needs Python 3.10 or newer: set PYTHON to one" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: python3-venv)," \
	         "or use an environment of your own: make VENV= PYTHON=..." >&2; exit 1; }
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) -r third_party/requirements.txt
	$(PIP) --no-deps -r third_party/headers.txt
	$(PY) -m third_party.cuda >/dev/null 2>&1 || $(PIP) --no-deps -r third_party/cuda-headers.txt
	@touch $@

clean:
	rm -rf build dist python/*.egg-info python/cute_kernels/_C.*.so
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
