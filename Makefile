# Each command does its own set-up in .venv; `make tour` is the one to begin with.
VENV ?= .venv
PY := $(VENV)/bin/python
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PYDEVD_DISABLE_FILE_VALIDATION := 1
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
say = @printf '\n== %s\n'

.PHONY: help tour lab test check notebooks unit fuzz cover bench export readme clean

help:
	@sed -n 's/^## //p' Makefile

$(VENV)/.tour: pyproject.toml tools/venv.sh
	@bash tools/venv.sh $(VENV) opencl,tours && touch $@

$(VENV)/.dev: pyproject.toml tools/venv.sh
	@bash tools/venv.sh $(VENV) opencl,dev && touch $@ $(VENV)/.tour

$(VENV)/.peer: $(VENV)/.dev
	@$(PY) -m pip install -q tinygrad==0.14.0 && touch $@

## make tour     an expression on its way to machine code, then real digits, learned and checked
tour: $(VENV)/.tour
	@$(PY) tools/tell.py nbs/tours/51_digits.ipynb

## make lab      the book, in JupyterLab
lab: $(VENV)/.dev
	@jupyter lab $$([ "$$(id -u)" != 0 ] || echo --allow-root) index.ipynb

## make test     everything that CI runs
test: check notebooks unit

# export in sync, notebooks clean, README in sync, page targets, exercises, lint, types
check: $(VENV)/.dev
	$(say) 'the package is what the notebooks export'
	@$(PY) tools/notebooks.py --check export
	$(say) 'the notebooks are stored clean'
	@$(PY) tools/notebooks.py --check clean
	$(say) 'README.md is what index.ipynb says'
	@$(PY) tools/readme.py --check
	$(say) 'lint'
	@ruff check
	$(say) 'types'
	@mypy

notebooks: $(VENV)/.dev
	$(say) 'every notebook runs and gives its stored outputs'
	@$(PY) -m pytest -q --nbval --nbval-sanitize-with nbval.cfg --nbval-cell-timeout 120 index.ipynb nbs

unit: $(VENV)/.dev
	$(say) 'tests'
	@$(PY) -m pytest -q -n auto --dist worksteal tests

## make fuzz     random graphs and random programs against NumPy, the long run
fuzz: $(VENV)/.dev
	@FUZZ=1 $(PY) -m pytest tests -k fuzz

## make cover    which lines of ir/ and schedule/ neither a test nor a page runs (half an hour)
cover: $(VENV)/.dev
	@coverage erase
	@coverage run -m pytest -q tests   # which run the code of all pages too, for their exercises
	@coverage combine -q && coverage report

## make bench    scheduling time, fusion and memory against the peer
bench: $(VENV)/.peer
	@for lib in tinysched tinygrad; do DEV=CPU $(PY) bench/fusion_table.py --lib $$lib --run; done
	@$(PY) bench/planner_table.py
	@for lib in tinysched tinygrad; do DEV=CPU $(PY) bench/sched_bench.py --lib $$lib --only chain,indep,mlp3; done

## make export   the package again from the notebooks, after an edit
export: $(VENV)/.dev
	@$(PY) tools/notebooks.py export clean

## make readme   README.md again from index.ipynb
readme: $(VENV)/.dev
	@$(PY) tools/readme.py

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .hypothesis
