# make demo | test | docs | bench | lint | train-mini | clean
#
# `.venv` is built once, from the exact versions of constraints.txt: the demo needs only the core; test, docs and lint add
# their groups to it. A stamp file inside .venv says what is in there.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --constraint constraints.txt
DATA ?=
CORPUS ?= ../shared/data/corpus
BENCHMARKS ?= ../shared/data/benchmark

.PHONY: demo test docs bench lint train-mini clean

# torch goes first and by its exact version: left to a looser range, pip may fetch gigabytes of CUDA libraries.
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable ".[plot]"
	touch $@

$(VENV)/.groups: $(VENV)/.core
	$(PIP) --group dev --group test --group doc
	touch $@

$(VENV)/.bench: $(VENV)/.core
	$(PIP) --no-build-isolation --editable ".[plot,bench]"
	touch $@

demo: $(VENV)/.core
	$(PY) scripts/demo.py $(if $(DATA),--data "$(DATA)")

test: $(VENV)/.groups
	$(PY) -m pytest --cov=scdiva --cov-report=term

docs: $(VENV)/.groups
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.bench
	$(PY) benchmarks/zero_shot.py --data "$(BENCHMARKS)"
	$(PY) benchmarks/memory.py --data "$(BENCHMARKS)/gasperini_k562_highmoi_40002_366g.h5ad"

lint: $(VENV)/.groups
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

train-mini: $(VENV)/.core
	$(PY) scripts/train_mini.py --corpus "$(CORPUS)"

clean:
	rm -rf $(VENV) demo docs/_build docs/generated docs/notebooks build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
