# `make demo` and `make test` need nothing but Python 3.11-3.13 and make: they create .venv on first use.

# Naming torch in the one command keeps pip from taking a newer CUDA build; override with `make TORCH=torch demo`.
TORCH ?= torch==2.13.0
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
WORKERS ?= 2

BIN := .venv/bin
# The stamp's name holds a sum of pyproject.toml: the environment is made anew when its contents change, not its date.
STAMP := .venv/installed-$(shell echo '$(TORCH)' | cat - pyproject.toml | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all gpu check golden format bench clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

env: $(STAMP) ## Create .venv and install everything into it

demo: $(STAMP) ## Compare policies in simulation and on the CPU engine; calibrate this machine (three minutes)
	$(BIN)/python -m playground +experiment=quickstart
	$(BIN)/python -m playground +experiment=own_machine

test: $(STAMP) ## Run the whole CPU suite (under ten minutes on two cores)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not gpu and not benchmarks and not product"

test-all: $(STAMP) ## Every layout with every policy and model, too (hours; -k of pytest, as K=pp2, runs a part)
	$(BIN)/python -m pytest -v -n $(WORKERS) -m product $(if $(K),-k "$(K)") tests/engine/parallel

gpu: $(STAMP) ## Run the tests that need a GPU (under two minutes)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -q -n 4 --dist loadfile -m gpu tests/gpu

check: $(STAMP) ## Format check, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: $(STAMP) ## Rewrite the golden decisions: read the diff before you commit it
	$(BIN)/python -m pytest -q tests/golden --rewrite-golden

bench: $(STAMP) ## Measure speed (slow; needs a quiet machine)
	$(BIN)/python -m pytest -q -s -m benchmarks

clean: ## Remove runs, caches and build outputs (not .venv)
	rm -rf runs multirun build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print | xargs rm -rf

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 found: install one, or say where: make PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "PYTHON=$(PYTHON) is not Python 3.11, 3.12 or 3.13: say where one is: make PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Installing into .venv with $(PYTHON): about 2 GB, one to five minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --no-compile -e '.[engine,wandb,report,search,dev]' $(TORCH)
	@rm -f .venv/installed-*
	@touch $@
