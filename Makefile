# `make test` and `make bench` need Python 3.11 or newer and nothing else. Switches:
#   PYTHON=python3.12   which interpreter to start from
#   VENV=path           where the environment lies
#   NO_VENV=1           install nothing: PYTHON already has all that the target imports
#   ARGS="..."          handed on by bench and test
#   UPGRADE=1           lock: move every pin, not only those that no longer fit

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

CHECK_PYTHON = $(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	"packckpt needs Python 3.11 or newer, and $(PYTHON) is %d.%d: set PYTHON=..." % v[:2])'

ifdef NO_VENV
PY := $(PYTHON)
READY := check-python
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

CODE := $(wildcard packckpt benchmarks analysis) tools
LINTED := $(CODE) $(wildcard tests)

.PHONY: help venv check-python bench gpu-check report results-check readme test-analysis test test-slow lint format types lock lock-check wheel wheel-check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

venv: $(READY) ## make the environment, or bring it up to date

check-python:
	@$(CHECK_PYTHON)

$(VENV)/.ready: pyproject.toml requirements/dev.lock tools/make_venv.py
	@$(CHECK_PYTHON)
	$(PYTHON) tools/make_venv.py $(VENV)
	@touch $@

bench: $(READY) ## measure: python -m benchmarks run
	$(PY) -m benchmarks run $(ARGS)

report: $(READY) ## tables, plots and decision of the newest run, or of ARGS, and the index of all
	$(PY) -m analysis report $(ARGS)
	$(PY) -m analysis index

results-check: $(READY) ## fail when a file under results/, or the README's table, is not what the records give
	$(PY) -m analysis check
	$(PY) tools/readme.py --check

readme: $(READY) ## put the first screen of the newest run's summary into README.md
	$(PY) tools/readme.py

test-analysis: $(READY) ## the analysis' tests alone; they need neither torch nor packckpt
	$(PY) -m pytest --confcutdir tests/analysis tests/analysis $(ARGS)

test: $(READY) ## run the tests; a warning is an error
	$(PY) -m pytest -m "not slow" $(ARGS)

test-slow: $(READY) ## run the tests that take minutes: 20 runs of A against A, costs on the real clock
	$(PY) -m pytest -m slow $(ARGS)

gpu-check: check-python ## on a GPU node: the tests marked gpu, and a run of 8 minutes; installs nothing
	PYTHON=$(PYTHON) bash benchmarks/launch/gpu_check.sh $(ARGS)

lint: $(READY) ## check style and format
	$(PY) -m ruff check $(LINTED)
	$(PY) -m ruff format --check $(LINTED)

format: $(READY) ## fix what lint can fix
	$(PY) -m ruff check --fix-only $(LINTED)
	$(PY) -m ruff format $(LINTED)

types: $(READY) ## mypy --strict
	$(PY) -m mypy --strict $(CODE)

lock: $(READY) ## rewrite requirements/dev.lock
	$(PY) tools/lock.py $(if $(UPGRADE),--upgrade)

lock-check: $(READY) ## fail when requirements/dev.lock is not current
	$(PY) tools/lock.py --check

wheel: $(READY) ## build the wheel into dist/
	@rm -f dist/packckpt-*.whl
	$(PY) -m build --wheel --no-isolation --outdir dist

wheel-check: wheel ## fail when the wheel holds or requires more than it should
	$(PY) tools/wheel_check.py dist/packckpt-*.whl

clean: ## remove caches and build outputs; the environment stays
	rm -rf build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(LINTED) -name __pycache__ -type d -prune -exec rm -rf {} +
