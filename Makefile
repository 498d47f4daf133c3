# Every target first makes .venv what requirements/ says (scripts/bootstrap.py); when it is that already, nothing happens.
# GPU=1 chooses the packages for CUDA, GPU=0 those for the CPU (the default); the choice is remembered.
# ARGS is passed on: make test ARGS="-k grpo -x", make requirements ARGS=--upgrade

PYTHON3 ?= python3
PYTHON := .venv/bin/python
SOURCES := lightning_megatron_rl tests scripts $(wildcard examples benchmarks)

# every process imports torch, Megatron or vLLM: without bytecode on disk that takes three times as long
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck format docs requirements clean

help: ## This list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

setup: ## Install uv (if missing) and everything else into .venv
	@$(PYTHON3) scripts/bootstrap.py

demo: setup ## SFT, then GRPO with vLLM rollouts, on two CPU cores
	@$(PYTHON) examples/demo/run.py $(ARGS)

# two tests at a time: they are made for two cores. ARGS="-n 0" runs one after the other, as --pdb needs it
test: setup ## Run the tests
	@$(PYTHON) -m pytest -n 2 $(ARGS)

lint: setup ## Check style
	@$(PYTHON) -m ruff check $(SOURCES)
	@$(PYTHON) -m ruff format --check $(SOURCES)

typecheck: setup ## Check types
	@$(PYTHON) -m mypy

format: setup ## Rewrite the code in the project's style
	@$(PYTHON) -m ruff check --fix $(SOURCES)
	@$(PYTHON) -m ruff format $(SOURCES)

docs: setup ## Build the documentation into site/; a broken link is an error
	@$(PYTHON) -m mkdocs build --strict $(ARGS)

requirements: setup ## Compile requirements/*.txt from pyproject.toml
	@$(PYTHON) scripts/compile_requirements.py $(ARGS)

clean: ## Remove .venv, .tools and caches
	rm -rf .venv .tools .pytest_cache .ruff_cache .mypy_cache dist build site
