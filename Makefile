# make train    set up .venv and train the default experiment    make train ARGS='trainer.devices=2'
# make test     set up .venv and run the tests                   make test ARGS='-k ddp' WORKERS=0
# make fast     the tests without the slow ones
# make check    lint, format, spelling, types
# make clean    remove caches and builds (neither .venv nor outputs)

PYTHON      ?= python3
VENV        ?= .venv
EXTRAS      ?= dev,sweep,slurm
# Requirement for torch, e.g. TORCH='torch==2.13.0', and the package index to take it from (empty: pip's own).
TORCH       ?= torch
TORCH_INDEX ?=
# Further arguments of every pip install, e.g. PIP_ARGS='--proxy ...'.
PIP_ARGS    ?=
ARGS        ?=
# Tests that run at once, each file as a whole by one of so many processes; 0: one after another in this one.
WORKERS     ?= 3

CODE := src tests
CODE += $(wildcard notebooks)  # example

PY    := $(VENV)/bin/python
PIP    = $(PY) -m pip install --quiet $(PIP_ARGS)
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed

.PHONY: train test fast check clean
.DELETE_ON_ERROR:

train: $(STAMP)
	$(PY) -m project.train $(ARGS)

test: $(STAMP)
	$(PYTEST) $(ARGS)

fast: WORKERS = 2# few of these wait for anything, and each worker takes ten seconds to import all tests
fast: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

check: $(STAMP)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m codespell_lib
	$(PY) -m mypy

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first, because its build matters most: the default index gives the CUDA build on Linux x86_64,
# several GB that a machine without a GPU has no use for. So, unless TORCH_INDEX names an index, pip is first
# asked for a build among the files at hand (--no-index: only what pip's own find-links setting lists; an
# administrator, an air-gapped cluster or a CI image keeps a fitting wheel there). --no-deps, because torch's own
# dependencies are small and come with the project below, from the index. The last line then finds torch
# installed, and keeps it if pyproject.toml's range admits it.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@set -e; \
	if [ -n '$(TORCH_INDEX)' ]; then \
	  echo 'Installing $(TORCH) from TORCH_INDEX'; $(PIP) --index-url '$(TORCH_INDEX)' '$(TORCH)'; \
	elif $(PIP) --no-index --no-deps '$(TORCH)' 2>/dev/null; then \
	  echo 'Took $(TORCH) from local files'; \
	else \
	  if [ "$$(uname -sm)" = 'Linux x86_64' ] && [ ! -e /proc/driver/nvidia ] && ! command -v nvidia-smi >/dev/null; then \
	    echo 'No NVIDIA GPU here, yet pip is about to fetch the CUDA build of torch (several GB). For the small CPU build, stop this and add to the command: TORCH_INDEX=<the CPU index that pytorch.org'"'"'s install selector shows>'; \
	  fi; \
	  $(PY) -m pip install $(PIP_ARGS) '$(TORCH)'; \
	fi
	$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@
