# The two commands of a newcomer, `make demo` and `make test`, and the habits of a developer; `make`
# lists all. Stamp files in .venv note what is installed: a second run starts where the first ended.

PYTHON ?= python3
# It makes .venv, no more: tools/torchrun.sh reads a variable of that name too.
unexport PYTHON
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
PIP := $(IN_VENV) $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --quiet --constraint requirements/lock.txt
REQUIREMENTS := build runtime mm tests dev docs
PYTEST_ARGS ?=

# A toolkit without a GPU must not cost a demo an hour: no CUDA build where no GPU is visible, and
# only that GPU's architecture where one is. Both can be set from outside.
GPU_ARCHITECTURES := $(shell tools/dev/gpu_architectures.sh)
ifeq ($(GPU_ARCHITECTURES),)
export VIM_MM_BUILD_CUDA ?= 0
else
export TORCH_CUDA_ARCH_LIST ?= $(GPU_ARCHITECTURES)
# Tests that measure time and memory of a GPU want it for themselves: one process.
WORKERS ?= 0
endif

NATIVE_SOURCES := setup.py $(shell find csrc -type f)

.DEFAULT_GOAL := help
.PHONY: help install install-det demo demo-det demo-real test test-all test-fast lint format docs wheel wheel-cuda check-wheel release-check lock clean distclean
.DELETE_ON_ERROR:
# pip must not run twice at once in one environment.
.NOTPARALLEL:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMPS)/extension $(STAMPS)/mmcv ## Make .venv with everything that segmentation needs

install-det: $(STAMPS)/extension $(STAMPS)/mmcv-with-ops ## The same, and the operators of mmcv that detection needs

demo: install ## Show what the model that ships finds, then train a segmentor on drawn shapes; about 6 minutes
	$(call run_demo,configs/seg/upernet_vim_shapes.py,4 minutes)

demo-det: install-det ## The same with a detector; about 10 minutes
	$(call run_demo,configs/det/mask_rcnn_vim_shapes.py,8 minutes)

demo-real: install ## Train a small classifier on photographs of garments; its mistakes in vim_fashion_zoh
	@$(IN_VENV) python -m vim_mm.datasets.fashion --out data/fashion --only classes
	$(call train_and_report,configs/cls/vim_fashion_zoh.py)

# Arguments: the config, and how long it trains on two cores.
define run_demo
@echo 'Step 1 of 3, half a minute: the model that ships looks at satellite images (demo/README.md).'
@$(IN_VENV) python tools/infer.py configs/seg/upernet_vim_earth.py demo/earth.pth demo/earth/images --out work_dirs/earth
@echo 'Step 2 of 3, half a minute: a data set of drawn shapes.'
@$(IN_VENV) python -m vim_mm.datasets.shapes --out data/shapes
@echo 'Step 3 of 3, $(2) on two cores: a training with $(1).'
$(call train_and_report,$(1))
endef

define train_and_report
@$(IN_VENV) python tools/train.py $(1) --resume
@$(IN_VENV) python tools/demo_report.py work_dirs/$(basename $(notdir $(1)))
endef

# Most tests use one core. Workers take whole files: tests of a file share fixtures, and some of them ports.
# The fast ones share little, so there a worker that is done takes tests from the other.
WORKERS ?= 2
# Long files come first (tests/conftest.py); xdist would begin with those of the most tests. A worker
# that was started for one that crashed would wait for tests forever.
PYTEST = $(IN_VENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	--max-worker-restart 0

test: install-det $(STAMPS)/tests ## Run what a user's results depend on, or a part of it (PYTEST_ARGS="-k scan")
	$(PYTEST) -m 'not slowest' $(PYTEST_ARGS)

test-all: install-det $(STAMPS)/tests ## The same with emulated CUDA, wheels, Triton for HIP, fuzzing and benchmarks
	$(PYTEST) $(PYTEST_ARGS)

test-fast: install-det $(STAMPS)/tests ## Run the quick tests, which touch every module
	$(PYTEST) -m 'not slow' --dist worksteal $(PYTEST_ARGS)

lint: $(STAMPS)/dev $(STAMPS)/runtime ## Check style, Python and native, and the types of the public API
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files 'csrc/*' 'vim_mm/*.cpp' 'tests/emulation/*.cpp' 'tests/emulation/*.h' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(STAMPS)/dev ## Repair style, Python and native
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files 'csrc/*' 'vim_mm/*.cpp' 'tests/emulation/*.cpp' 'tests/emulation/*.h' | xargs $(BIN)/clang-format -i

docs: install $(STAMPS)/docs ## Build the documentation site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/docs

wheel: $(STAMPS)/runtime $(STAMPS)/tests ## Build the sdist and the wheel of the CPU in dist, and audit the wheel
	tools/dev/preflight.sh $(BIN)/python compiler
	$(IN_VENV) python tools/dev/build_wheel.py build

wheel-cuda: $(STAMPS)/runtime $(STAMPS)/tests ## The same in dist/cuda, with CUDA kernels for every architecture of setup.py
	tools/dev/preflight.sh $(BIN)/python compiler toolkit
	$(IN_VENV) python tools/dev/build_wheel.py build --cuda --out dist/cuda

check-wheel: $(STAMPS)/dev ## Install the wheel in dist in empty environments and run the tests of the operators there
	$(IN_VENV) python tools/dev/check_wheel.py

release-check: $(STAMPS)/runtime $(STAMPS)/tests $(STAMPS)/dev ## Check version, changelog and tag; build and audit what a release uploads
	tools/dev/preflight.sh $(BIN)/python compiler
	$(IN_VENV) python tools/dev/check_release.py

lock: $(STAMPS)/dev ## Choose the versions in requirements/lock.txt anew
	cd requirements && ../$(BIN)/uv pip compile --quiet --universal --python-version 3.10 \
	    --no-python-downloads --fork-strategy fewest --no-annotate --no-header --upgrade \
	    $(REQUIREMENTS:%=%.txt) --output-file lock.txt

clean: ## Remove what was built, but not .venv, data and runs
	rm -rf build dist ./*.egg-info vim_mm/_C*.so $(STAMPS)/extension .mypy_cache .pytest_cache .ruff_cache

distclean: clean ## Remove .venv as well
	rm -rf $(VENV)

$(STAMPS)/venv:
	tools/dev/preflight.sh $(PYTHON) python
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: $(addprefix requirements/,build.txt runtime.txt mm.txt mm-no-deps.txt lock.txt) | $(STAMPS)/venv
	tools/dev/preflight.sh $(BIN)/python compiler $(if $(wildcard $@),,disk)
	@echo 'Installing PyTorch and the task libraries: about 2 minutes, without a line meanwhile.'
	$(PIP_INSTALL) -r requirements/build.txt -r requirements/runtime.txt -r requirements/mm.txt
	$(PIP) install --quiet --no-deps -r requirements/mm-no-deps.txt
	touch $@

$(STAMPS)/mmcv: requirements/mmcv.txt $(STAMPS)/runtime
	$(BIN)/python tools/dev/install_mmcv.py
	touch $@

$(STAMPS)/mmcv-with-ops: requirements/mmcv.txt $(STAMPS)/runtime
	$(BIN)/python tools/dev/install_mmcv.py --with-ops
	touch $@ $(STAMPS)/mmcv

$(STAMPS)/extension: $(NATIVE_SOURCES) $(STAMPS)/runtime
	tools/dev/preflight.sh $(BIN)/python compiler
	@echo 'Compiling the operators: about 2 minutes for a CPU, longer for a GPU, without a line meanwhile.'
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(STAMPS)/tests $(STAMPS)/dev $(STAMPS)/docs: $(STAMPS)/%: requirements/%.txt requirements/lock.txt | $(STAMPS)/venv
	$(PIP_INSTALL) -r $<
	touch $@
