# make help   lists the targets.
#
# Everything runs in .venv, which the first target that needs it creates from requirements/dev.txt.
# `make test PYTHON=python3` uses that Python as it is, and creates and installs nothing.

PY ?= python3
FUSELAGE_VENV ?= .venv

ifdef PYTHON
  ENVIRONMENT :=
  CLANG_FORMAT ?= clang-format
  ZIZMOR ?= zizmor
  ACTIONLINT ?= actionlint
else
  HASH := $(shell cat requirements/dev.txt | sha256sum | cut -c1-12)
  ENVIRONMENT := $(FUSELAGE_VENV)/.installed-$(HASH)
  PYTHON := $(FUSELAGE_VENV)/bin/python
  CLANG_FORMAT ?= $(FUSELAGE_VENV)/bin/clang-format
  ZIZMOR ?= $(FUSELAGE_VENV)/bin/zizmor
  ACTIONLINT ?= $(FUSELAGE_VENV)/bin/actionlint
endif

BUILD := $(PYTHON) tools/build_variant.py
ARCHS ?=
PTX ?=
CODE = $(shell find kernel_src torch-ext tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) \
         ! -path torch-ext/registration.h)

.DEFAULT_GOAL := help
.PHONY: help demo build build-cpu build-cuda test test-long test-all ci-test fuzz sanitize \
  emulate-gpu lint format bench tune check-hip check-abi official-build check-compliance check-size \
  docs clean test-torch-matrix test-newest-models check-reproducible site

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 21

demo: build  ## build, then run a small Llama with fuselage's layers
	$(PYTHON) examples/demo.py

build: $(ENVIRONMENT)  ## the variant for this machine: CUDA with a GPU and nvcc, otherwise CPU
	@$(BUILD)

build-cpu: $(ENVIRONMENT)  ## the CPU variant
	@$(BUILD) --backend cpu

build-cuda: $(ENVIRONMENT)  ## the CUDA variant for every GPU of build.toml (ARCHS=9.0,8.0 for some; PTX=1)
	@$(BUILD) --backend cuda $(if $(ARCHS),--archs $(ARCHS)) $(if $(PTX),--ptx)

# A process a core, so one thread each.
RUN_TESTS = OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses=auto --dist=worksteal

test: build  ## build, then run the quick tests (TESTS= and PYTEST= choose and pass options)
	$(RUN_TESTS) -m "not slow and not long" $(PYTEST) $(TESTS)

test-long: build  ## build, then run the tests that `make test` leaves out
	$(RUN_TESTS) -m "slow or long" $(PYTEST) $(TESTS)

test-all: build  ## build, then run every test
	$(RUN_TESTS) $(PYTEST) $(TESTS)

ci-test: build  ## the tests that the Hub's builder runs, in a folder like its own (a minute at most)
	$(PYTHON) tools/ci_test.py -q $(PYTEST)

test-torch-matrix: build-cpu  ## all but slow tests on one CPU variant under the oldest to newest Torch
	$(PYTHON) tools/torch_matrix.py $(if $(TORCH),--torch $(TORCH)) -- \
	  --numprocesses=auto --dist=worksteal -m "not slow" $(PYTEST) $(TESTS)

NEWEST := .venv-newest

test-newest-models: build-cpu  ## all but slow tests of models, under the newest transformers and diffusers
	rm -rf $(NEWEST)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target $(NEWEST) \
	  transformers diffusers
	PYTHONPATH=$(CURDIR)/$(NEWEST):$$PYTHONPATH $(RUN_TESTS) -m "not slow" $(PYTEST) tests/integrations

fuzz: build  ## random calls of every function for a minute (CASE='op seed' replays; FUZZ= options)
	PYTHONPATH=tests:$$PYTHONPATH $(PYTHON) -m fuzz $(if $(CASE),--replay "$(CASE)") $(FUZZ)

sanitize: $(ENVIRONMENT)  ## tests and fuzzer under sanitizers (SANITIZE="--device cuda": on a GPU)
	$(PYTHON) tools/sanitize.py $(SANITIZE)

emulate-gpu: $(ENVIRONMENT)  ## tests of the GPU kernels, as ROCm has them, without a GPU (EMULATE=--all)
	$(PYTHON) tools/emulate_gpu.py $(EMULATE)

# NOTE: actionlint would run shellcheck and pyflakes where they happen to be.
lint: $(ENVIRONMENT)  ## ruff, clang-format, 100 columns, build.toml's sources, tuning, the workflows
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	@echo "$(CLANG_FORMAT) --dry-run -Werror ($(words $(CODE)) files)"
	@$(CLANG_FORMAT) --dry-run -Werror $(CODE)
	@$(PYTHON) tools/check_columns.py
	@$(BUILD) --check
	$(PYTHON) tools/check_tuning.py
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(ZIZMOR) --offline --no-progress --quiet .github/workflows
	$(ACTIONLINT) -shellcheck= -pyflakes= .github/workflows/*.yml

format: $(ENVIRONMENT)  ## rewrite the sources in the project's style
	$(PYTHON) -m ruff check --fix --exit-zero --quiet .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i $(CODE)

tune: build  ## measure launch policies on this GPU and write its file (TUNE= passes options)
	$(PYTHON) tools/tune.py $(TUNE)

bench: build  ## measure against PyTorch (BENCH= passes options; GPU: requirements/bench.txt first)
	$(PYTHON) -m benchmarks.roofline $(BENCH)

check-hip: $(ENVIRONMENT)  ## compile every GPU source for AMD gfx90a (clang 19, no GPU needed)
	@$(PYTHON) tools/check_hip.py

check-abi: $(ENVIRONMENT)  ## limited API, manylinux_2_28, Torch's stable ABI, no shared state
	@$(PYTHON) tools/check_abi.py

official-build: $(ENVIRONMENT)  ## a variant by kernel-builder's own CLI and CMake project, checked
	$(PYTHON) tools/official_build.py

check-compliance: $(ENVIRONMENT)  ## built variants against the Hub's requirements
	@$(PYTHON) tools/check_compliance.py

check-size: $(ENVIRONMENT)  ## the CUDA variant's size and compile time by file
	@$(PYTHON) tools/check_size.py

check-reproducible: $(ENVIRONMENT)  ## two CPU builds of HEAD are the same (ONLY=sources compiles these)
	@$(PYTHON) tools/check_reproducible.py $(if $(ONLY),--only $(ONLY))

docs: $(ENVIRONMENT)  ## write the generated pages: docs/reference, and the tables of the benchmarks
	$(PYTHON) tools/write_docs.py
	$(PYTHON) -m benchmarks.roofline.tables

# An environment of its own: nothing else needs MkDocs. NOTE: with --quiet it counts no warnings.
SITE := .venv-site
SITE_HASH := $(shell cat requirements/site.txt | sha256sum | cut -c1-12)

site: $(SITE)/.installed-$(SITE_HASH)  ## the documentation site, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict
	@echo "open site/index.html"

$(SITE)/.installed-$(SITE_HASH): requirements/site.txt
	$(PY) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check -r requirements/site.txt
	@rm -f $(SITE)/.installed-*
	@touch $@

clean:  ## remove build output, not .venv
	rm -rf site
	find build -mindepth 1 ! -name README.md -delete

ifneq ($(ENVIRONMENT),)
$(ENVIRONMENT): requirements/dev.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: Python 3.10 or newer is needed; name one with PY=python3.12" >&2; exit 1; }
	@$(PY) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PY) cannot create environments: apt-get install python3-venv" >&2; exit 1; }
	@echo "creating $(FUSELAGE_VENV) and installing requirements/dev.txt; minutes, once"
	$(PY) -m venv $(FUSELAGE_VENV)
	$(PYTHON) -m pip install --disable-pip-version-check -r requirements/dev.txt
	@rm -f $(FUSELAGE_VENV)/.installed-*
	@touch $@
endif
