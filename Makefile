# Penstock: everything a person can do with the source tree. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Thousands of processes are started: without bytecode each of them would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

help: ## list these targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with Penstock and its locked dependencies

$(READY): requirements.lock pyproject.toml
	@echo "Setting up $(VENV) (locked dependencies, about a minute on a new machine) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r bootstrap.lock
	@$(BIN)/uv pip sync --quiet --compile-bytecode --system-certs --python $(BIN)/python --require-hashes bootstrap.lock requirements.lock
	@$(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $(READY)

lock: ## refresh requirements.lock from pyproject.toml
	@$(BIN)/uv pip compile --quiet --system-certs --universal --generate-hashes --no-annotate --no-header --no-emit-index-url --group dev --extra folder --extra s3 --extra ftp --extra otel pyproject.toml -o requirements.lock --python-version 3.11

demo: setup ## run 2,000 requests against a mock upstream, kill the run half-way and go on; then a table's rows
	@$(BIN)/python examples/demo.py

# One more than there are cores: many tests wait, for a grace, a drain or a packet that does not come.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The tests, and `make check` beside them; what it finds is printed last, where it is seen.
define CHECK_AND_TEST
	@scripts/system-packages
	@said=$$(mktemp); trap 'rm -f "$$said"' EXIT; \
	$(MAKE) --no-print-directory check >"$$said" 2>&1 & check=$$!; \
	$(PYTEST) $(1); tests=$$?; \
	wait $$check; checked=$$?; \
	if [ $$checked -ne 0 ]; then echo "make check found:"; fi; cat "$$said"; \
	if [ $$tests -ne 0 ] || [ $$checked -ne 0 ]; then echo "tests: exit code $$tests, make check: $$checked"; exit 1; fi
endef

test: setup ## check, and run the tests on PostgreSQL 18, and on 15 where it may differ
	$(call CHECK_AND_TEST)

test-all: setup ## the same, and what shows the same again: everything on 15, every order of a race; before a release
	$(call CHECK_AND_TEST,--all)

flakes: setup ## every test again and again, in random order, on busy cores: make flakes MINUTES=60 SEED=1 TESTS=tests/flow
	@scripts/system-packages
	@$(BIN)/python -m tests.flakes --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1) $(TESTS)

check: setup ## lint, format, types, and known vulnerabilities of what is locked
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python scripts/audit.py

format: setup ## format the source
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

bench: setup ## measure against peers and against bare PostgreSQL, side by side
	@$(BIN)/python -m bench

attacks: setup ## every attack at once beside a tenant that behaves: make attacks MINUTES=10
	@$(BIN)/python -m tests.attacks --minutes $(or $(MINUTES),10)

chaos: setup ## a seeded run of faults, checked: make chaos SEED=1 MINUTES=10
	@$(BIN)/python -m tests.chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10)

chaos-sessions: setup ## the same over sessions and their callers: make chaos-sessions SEED=1 SESSIONS=500 REQUESTS=20 REPLICAS=3
	@$(BIN)/python -m tests.chaos.sessions --seed $(or $(SEED),1) --sessions $(or $(SESSIONS),500) --requests $(or $(REQUESTS),20) --replicas $(or $(REPLICAS),3)

chaos-jobs: setup ## a table through kills of everything, compared row by row: make chaos-jobs ROWS=100000
	@$(BIN)/python -m tests.chaos.jobs --kind csv --rows $(or $(ROWS),100000)
	@$(BIN)/python -m tests.chaos.jobs --kind xlsx --rows $(or $(ROWS),100000)

fuzz: setup ## odd requests with real ids over every operation, none may fail: make fuzz REQUESTS=20000 SEED=1
	@scripts/system-packages
	@FUZZ_REQUESTS=$(or $(REQUESTS),20000) FUZZ_SEED=$(or $(SEED),1) $(BIN)/python -m pytest -n 0 tests/security/test_fuzz.py

races: setup ## every order of every few moves at once (make test has a quarter of those of two, a twelfth of those of three)
	@$(PYTEST) --all tests/race

replay: setup ## the same faults once more, everything kept: make replay SEED=1
	@$(BIN)/python -m tests.chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10) --keep

conformance: setup ## the official clients in every major version, and what is built on them, against a server
	@$(BIN)/python -m tests.conformance

docs: setup ## write the pages that are made from the source
	@$(BIN)/python scripts/configuration_page.py
	@$(BIN)/python scripts/reference_pages.py

screenshots: setup ## every page of the console, light and dark, wide and narrow, into docs/console: make screenshots PAGES="job keys"
	@scripts/system-packages
	@$(BIN)/python -m tests.screenshots $(PAGES)

vendor: setup ## fetch the console's libraries from npm as their vendor.toml names them, and check them
	@$(BIN)/python scripts/vendor.py

check-console: setup ## check the types of the console's pages (needs npm)
	@$(BIN)/python scripts/console_types.py

clean: ## remove the environment and what the demo wrote
	@rm -rf $(VENV) demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help setup lock demo test test-all flakes check format bench attacks chaos chaos-sessions chaos-jobs fuzz races replay conformance docs screenshots vendor check-console clean
