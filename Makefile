# The two commands a stranger needs are `make run` and `make test`; `make help` lists the rest.
PYTHON ?= python3
# Hundreds of interpreters start in a test run: each would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE
# Another order of sets for each run; a failed seed of the simulation needs it to be repeated.
PYTHONHASHSEED ?= $(shell $(PYTHON) -c 'import random; print(random.randrange(1, 2**32))')
export PYTHONHASHSEED := $(PYTHONHASHSEED)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Two workers per core, for many tests wait, but not more than have an engine each to spare;
# `make test ARGS=-n0` runs the tests one by one.
PARALLEL := -n $(shell $(PYTHON) -c 'import os; print(min(2 * (os.cpu_count() or 1), 4))') --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help run test torture engines lint format docs bench bench-peers results dev-engines lock clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/.run: requirements/run.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Holdfast needs Python 3.11 or newer; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/run.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/dev.lock
	@touch $@

run: $(VENV)/.run ## Install and serve with embedded storage on 127.0.0.1:8080 (ARGS="--port 9000")
	@$(BIN)/holdfast serve $(ARGS)

test: $(VENV)/.dev lint ## Install what the tests need and run them all
	$(BIN)/python -m pytest -q -m alone $(ARGS) -n0 || [ $$? = 5 ]  # 5: ARGS choose none of these
	$(BIN)/python -m pytest -q -m "not alone" $(PARALLEL) $(ARGS)

torture: $(VENV)/.dev ## Run the long proofs (up to an hour)
	TORTURE=1 $(BIN)/python -m pytest -q -m torture -n0 --timeout 1800 $(ARGS)

.venv-clients/.done: tests/clients/python/requirements.lock
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

engines: $(VENV)/.dev .venv-clients/.done ## Run other people's clients: npm SDKs, Chromium, Agents SDK, LangChain
	npm ci --prefix tests/clients/node --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m pytest -q -n0 tests/clients $(ARGS)

lint: $(VENV)/.dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## Put the code into its usual form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev ## Write the generated pages of docs/reference anew
	$(BIN)/python docs/generate.py

bench: $(VENV)/.dev ## Run the benchmarks beside their peers and print the ratios
	$(BIN)/python bench/messaging.py $(ARGS)
	$(BIN)/python bench/work.py $(ARGS)
	$(BIN)/python bench/limits.py $(ARGS)
	$(BIN)/python bench/store.py $(ARGS)
	$(BIN)/python bench/streaming.py $(ARGS)
	$(BIN)/python bench/engines.py $(ARGS)

bench-peers: ## Install LiteLLM's proxy into .venv-peers, to be measured beside Holdfast
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r bench/peers.lock

dev-engines: $(VENV)/.dev ## Start the engines the tests use and leave them running until Ctrl-C
	cd tests && ../$(BIN)/python -m engines $(ARGS)

results: $(VENV)/.dev ## Run the proofs of the short tier and write RESULTS.md
	rm -rf .results
	$(BIN)/python -m pytest -q -m alone -n0 tests/integration
	$(BIN)/python -m pytest -q -m "not alone" $(PARALLEL) tests/simulation tests/integration $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m proof.results .results > RESULTS.md.new
	mv RESULTS.md.new RESULTS.md

COMPILE := uv pip compile -q --universal --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
  --custom-compile-command 'make lock' -p 3.11
EXTRA_REQUIREMENTS = import sys, tomllib; \
  print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]]))

lock: ## Resolve the dependencies again, those of each extra too (needs uv)
	$(COMPILE) pyproject.toml requirements/build.in -o requirements/run.lock
	$(COMPILE) --group dev --group bench -c requirements/run.lock -o requirements/dev.lock pyproject.toml
	set -e; for extra in otel postgres redis; do $(PYTHON) -c '$(EXTRA_REQUIREMENTS)' $$extra \
	  | $(COMPILE) - -c requirements/run.lock -c requirements/dev.lock -o requirements/$$extra.lock; done
	$(COMPILE) tests/clients/python/requirements.in -o tests/clients/python/requirements.lock
	$(COMPILE) bench/peers.in -o bench/peers.lock

clean: ## Remove what was installed and cached here; a state directory is never touched
	rm -rf $(VENV) .venv-peers .venv-clients tests/clients/node/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .results dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
