# The two commands for newcomers are `make demo` and `make test`; they need python3 (3.11 or newer) with its venv.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.made-from-requirements
OLD_PYTHON := Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11

.PHONY: demo up test faults bench check

# One real batch through a real model, watched to its end.
demo: $(STAMP)
	@exec $(RUN) -m worker demo

# Everything in the foreground, until SIGINT or SIGTERM.
up: $(STAMP)
	@exec $(RUN) -m worker up

# What takes longest goes first, beside all the rest.
test: check
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/systemd tests
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report --skip-covered

# Every fault, the long ones and random seeds too; a line each, and at the end how many held.
faults: $(STAMP)
	$(RUN) -m pytest -m "slow or not slow" -n 2 --dist loadfile tests/systemd tests/faults tests/security tests/e2e/test_drill.py

bench: $(STAMP)
	$(RUN) -m pytest -m slow -s tests/bench

check: $(STAMP)
	$(RUN) -m ruff format --check --quiet .
	$(RUN) -m ruff check --quiet .
	$(RUN) -m mypy --no-error-summary app worker migrations tests
	$(RUN) -m basedpyright
	$(VENV)/bin/lint-imports --no-logo

# The stamp stands for a complete environment: an interrupted one is finished by the next call.
$(STAMP): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(OLD_PYTHON)" or 0)'
	@echo "making $(VENV) from $^ (once)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	@touch $@
