# make demo | test | test-faults | coverage | docs | recipes | screenshots | bench | results | faults | lint | package |
# conda | minimum | newest | prerelease | train-mini | clean
#
# `.venv` is built once, from the exact versions of constraints.txt: the demo needs only the core; test, docs and lint add
# their groups to it. A stamp file inside .venv says what is in there. constraints.txt is of Python 3.11: any other PYTHON
# takes the newest versions that pip finds, all but torch, in an environment of its own.
SHELL := /bin/bash
PYTHON ?= python3
# pyenv's python3.13 answers only where that version is chosen: then it is looked for among pyenv's versions
override PYTHON := $(or $(shell $(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null),$(lastword \
    $(wildcard $(HOME)/.pyenv/versions/*/bin/$(PYTHON))),$(error there is no $(PYTHON)))
MINOR := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
NEWEST := .venv-newest-$(MINOR)
ifeq ($(MINOR),3.11)
VENV := .venv
LOCK ?= --constraint constraints.txt
else
VENV := $(NEWEST)
LOCK ?=
endif
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet $(LOCK)
DATA ?=
# processes that run the tests, one thread each: half the time on two cores
WORKERS ?= 2
CORPUS ?= ../shared/data/corpus
# folder of the data sets that tutorials use
export SCDIVA_DATA_DIR ?= $(abspath $(wildcard ../shared/data/benchmark))

.PHONY: demo test test-faults coverage docs recipes screenshots bench results faults lint package conda minimum newest prerelease torch-for-cpu train-mini clean

# torch goes first and by its exact version. On Linux PyPI's build has gigabytes of CUDA libraries: without a GPU set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
$(VENV)/.core: pyproject.toml constraints.txt src/scdiva/_version.py
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.groups: $(VENV)/.core
	$(PIP) --group dev --group test --group doc
	touch $@

$(VENV)/.bench: $(VENV)/.core
	$(PIP) --no-build-isolation --editable ".[bench]"
	touch $@

demo: $(VENV)/.core
	$(PY) scripts/demo.py $(if $(DATA),--data "$(DATA)")

test: $(VENV)/.groups
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not fault"

# Bad input and broken machines.
test-faults: $(VENV)/.groups
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile -m fault

# Both, with what share of the lines they run: tracing takes half as long again.
coverage: $(VENV)/.groups
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --cov=scdiva --cov-report=term

# Tutorials are run here if a data folder or a mirror is set (docs/datasets.md), so that no build downloads anything from
# public servers. What they show is kept by scripts/tutorials.py.
docs: $(VENV)/.groups
	$(PY) scripts/examples.py
	$(if $(SCDIVA_DATA_DIR)$(SCDIVA_DATA_URL),OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --nbmake \
	  --nbmake-timeout=600 tutorials,@echo "Left out: the tutorials. SCDIVA_DATA_DIR names no folder with their data sets.")
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

# docs/recipes.md with the packages that it names, in an environment of their own that also has those of .venv.
RECIPES := .venv-recipes
recipes: $(VENV)/.groups
	test -x $(RECIPES)/bin/python || $(PYTHON) -m venv $(RECIPES)
	$(PY) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > $(RECIPES)/lib/python$(MINOR)/site-packages/core.pth
	$(RECIPES)/bin/python -m pip install --quiet --upgrade pip
	$(RECIPES)/bin/python -m pip install --quiet --group recipes
	OMP_NUM_THREADS=1 $(RECIPES)/bin/python scripts/examples.py recipes

# The built site in a Chromium, at two widths, light and dark; a page wider than its window fails the call.
screenshots: $(VENV)/.groups
	$(PIP) --group screenshots
	$(PY) scripts/screenshots.py

# Speed and memory at small sizes, at most fifteen minutes on a CPU with AVX2 only. All run, whatever the first of them
# says; a missed goal fails the call. What they find is not recorded: that is for each script at its own sizes.
SHORT = "speed.py --small --repeats 3" "scaling.py --cells 3000 10000 --genes 1000 20000 --calls pp.gene_entropy pp.entropy_serialize tl.embed_file tl.embed tl.adapt"
bench: $(VENV)/.bench
	@status=0; export SCDIVA_RESULTS=$$(mktemp -d); \
	for script in $(SHORT); do \
	  echo "== benchmarks/$$script"; $(PY) benchmarks/$$script || status=1; \
	done; \
	rm -r "$$SCDIVA_RESULTS"; exit $$status

# The task tables of docs/benchmarks.md at this commit, about three hours on two cores. Rows of this commit are not
# repeated, so that the call can be stopped and repeated. Rivals that are not installed are named, and their rows stay.
TASKS = annotation imputation integration finetuning embedding perturbation
results: $(VENV)/.bench
	test -d "$(DATA)" || { echo "DATA names no folder with benchmark files."; exit 1; }
	printf '%s\n' $(TASKS) | xargs -P $(WORKERS) -I{} $(PY) benchmarks/{}.py --data "$(DATA)" --again
	$(PY) benchmarks/tables.py

# Runs killed, stopped and out of disk space at random moments, compared with undisturbed runs: about four minutes. Then
# the tests of each class of bad input and of broken machines.
faults: $(VENV)/.groups
	OMP_NUM_THREADS=1 $(PY) scripts/faults.py --record
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile -q -m fault

lint: $(VENV)/.groups
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# What a stranger gets: sdist and wheel into dist/, installed and used in an empty environment elsewhere.
package: $(VENV)/.core
	$(PY) scripts/check_package.py --out dist

# conda-forge's recipe of that sdist. Not into dist/, all of which a release uploads.
conda: package
	mkdir -p build
	$(PY) scripts/conda_recipe.py dist/scdiva-*.tar.gz > build/recipe.yaml

# The lower bounds of pyproject.toml; TORCH=2.6.0 where the index has that build for CPUs.
minimum: $(VENV)/.core
	$(PY) scripts/check_package.py --minimum $(if $(TORCH),--torch "$(TORCH)")

# The suite on the newest of everything but torch, in an environment of its own for each Python; PYTHON=python3.13 names
# one. It stays as it was built: `make clean` before it takes what is newest today.
newest:
	$(MAKE) test test-faults VENV=$(NEWEST) LOCK=

# Fails where pip finds no build of torch for CPUs for this Python, and `newest` would take one with gigabytes of CUDA.
torch-for-cpu:
	$(PYTHON) -m pip install --dry-run --ignore-installed --no-deps --only-binary :all: \
	  "$$(grep '^torch==' constraints.txt)" | grep "^Would install torch-.*+cpu"

# As `newest`, with pre-releases.
prerelease:
	$(MAKE) test test-faults VENV=.venv-prerelease-$(MINOR) LOCK=--pre

train-mini: $(VENV)/.core
	$(PY) scripts/train_mini.py --corpus "$(CORPUS)"

clean:
	rm -rf .venv .venv-newest-* .venv-prerelease-* .venv-recipes demo docs/_build docs/generated docs/notebooks build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
