# The two commands to begin with: `make demo` and `make test`. They need Python 3.10 to 3.12 with its
# venv module, and nothing else: what they install stays in .venv (and .venv-latest) in this folder.

PYTHON ?= python3
ARGS ?=

# The last TensorFlow that tensorflow-io supports, and the newest one: setup.cfg says which versions.
IO_EXTRAS = io,convert,demo,test
LATEST_EXTRAS = train,convert,demo,test,tfds

.DEFAULT_GOAL := help
.PHONY: help env env-latest demo test test-latest lint check bench clean

help:
	@echo "make demo         convert the handwritten digits, train with two workers, explain the step time"
	@echo "make test         the whole test suite, on TensorFlow 2.16.2 with tensorflow-io"
	@echo "make test-latest  the whole test suite, on the newest TensorFlow"
	@echo "make check        lint, types and the quick tests: below two minutes"
	@echo "make bench        the benchmarks"
	@echo "make env, make env-latest   only the environments, .venv and .venv-latest"
	@echo "make clean        remove caches and build products (not the environments)"
	@echo "Options: PYTHON=python3.12 (to make the environment), ARGS='-k shard' (for pytest or the demo)"

env: .venv/.installed
env-latest: .venv-latest/.installed

# The stamp is written last, so an interrupted run is taken up again. An environment that was being
# made then (.unfinished), or whose pip does not run, is made anew; any other is only brought up to date.
define make_env
@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null || { \
  echo "error: PYTHON must be Python 3.10, 3.11 or 3.12, got '$(PYTHON)'" \
    "($$($(PYTHON) --version 2>&1)). Name another: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
  echo "error: '$(PYTHON)' must have the modules venv and ensurepip. Install them" \
    "(on Debian: apt-get install python3-venv), or name another: PYTHON=python3.11" >&2; exit 1; }
@set -e; \
if [ -e $(1)/.unfinished ] || ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
  clear=; if [ -e $(1)/pyvenv.cfg ]; then clear=--clear; fi; \
  $(PYTHON) -m venv $$clear $(1); \
  touch $(1)/.unfinished; \
fi; \
echo "Installing $(3) into $(1): about 2.6 GB, takes a few minutes ..."; \
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip; \
PYTHONWARNINGS=ignore $(1)/bin/python -m pip install --quiet --disable-pip-version-check \
  --editable '.[$(2)]'; \
rm -f $(1)/.unfinished; \
touch $@; \
echo "$(1) is ready."
endef

.venv/.installed: setup.cfg pyproject.toml
	$(call make_env,.venv,$(IO_EXTRAS),TensorFlow 2.16.2 with tensorflow-io; Apache Beam and the test tools)

.venv-latest/.installed: setup.cfg pyproject.toml
	$(call make_env,.venv-latest,$(LATEST_EXTRAS),the newest TensorFlow; Apache Beam and the test tools)

demo: env
	@.venv/bin/python -m tfpipe.demo $(ARGS)

test: env
	.venv/bin/python -m pytest $(ARGS)

test-latest: env-latest
	.venv-latest/bin/python -m pytest $(ARGS)

lint: env
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

check: lint
	.venv/bin/python -m pytest -q -m "not slow" -n 2 --dist worksteal $(ARGS)

bench: env
	.venv/bin/python -m pytest -o addopts="" -o python_files="*_benchmark.py" benchmarks $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find tfpipe beam_jobs tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
