# One command for each task of a developer; `make ci` is what is checked before a merge.
#
#   PYTHON   the interpreter that makes the environment, 3.11 or newer
#   TORCH    what pip installs for torch, before everything else, so that it is not replaced
#   VENV     where the environment lies
#
# pip takes its settings (index, proxy, wheel folders) from its own configuration.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
OLD := $(PYTHON) is missing or older than Python 3.11; name a newer one: make PYTHON=python3.11
GENERATED := README.md docs/cli.md
NATIVE := hatch_build.py src/entmtp/kernels/build.py $(wildcard src/entmtp/kernels/csrc/*)

.DEFAULT_GOAL := demo
.PHONY: demo test check fmt docs ci clean

demo: $(VENV)/.installed
	$(BIN)/entmtp pull smollm2-135m
	$(BIN)/entmtp demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/python -m cogapp -r $(GENERATED)

docs: $(VENV)/.installed-dev
	$(BIN)/python -m cogapp --check --check-fail-msg "run make fmt" $(GENERATED)
	$(BIN)/zensical build --config-file mkdocs.yml --clean --strict

ci: check test docs

# Leaves the environment alone: remove the folder by hand to start anew.
clean:
	rm -rf site dist build .cache .coverage
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(wildcard src tests examples benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an installation that was interrupted is done again. An installation
# builds the native library, where there is a compiler and the sources are newer.
$(VENV)/.installed: pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "$(OLD)" >&2; exit 1; }
	$(PYTHON) -m venv "$(VENV)"
	$(PIP) "$(TORCH)"
	$(PIP) --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --quiet --editable ".[dev,train]"
	@touch $@
