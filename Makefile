# Every target works from a bare checkout: what is missing is made first, what is there is left alone.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test check format bench generated constraints servers programs clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
INSTALL := $(PIP) --no-build-isolation --editable

help:
	@echo 'make demo                  the three tiers on real files, without any server to install'
	@echo 'make demo BROKER=rabbitmq  the same on a private RabbitMQ node'
	@echo 'make test [ARGS=…]         all tests, several at once; ARGS go to pytest'
	@echo 'make check                 ruff, mypy, import walls'
	@echo 'make format                put the code into the form that make check asks for'
	@echo 'make bench BENCH=NAME      one benchmark; its figures go to build/bench/NAME.json'
	@echo 'make generated             write anew what is generated: settings, metrics, rules, dashboard, public names'
	@echo 'make constraints           write constraints.txt anew from the newest releases'
	@echo 'make clean                 remove the virtual environment and everything built'

demo: $(VENV)/demo.stamp
	@case '$(BROKER)' in \
	  '') exec $(BIN)/inference-tasks demo $(ARGS) ;; \
	  rabbitmq) .ci/install rabbitmq-server && exec $(BIN)/inference-tasks demo --broker rabbitmq $(ARGS) ;; \
	  *) echo "BROKER is '$(BROKER)'; it can be rabbitmq, or be left out for the embedded broker" >&2; exit 2 ;; \
	esac

# Hundreds of processes are started, each of which would compile every module again.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/dev.stamp servers programs
	@$(BIN)/python -m pytest --numprocesses auto --dist loadgroup $(ARGS)

check: $(VENV)/dev.stamp
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy || status=1; \
	$(BIN)/lint-imports --cache-dir build/import-linter || status=1; \
	exit $$status

format: $(VENV)/dev.stamp
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/dev.stamp servers
	@test -n '$(BENCH)' || { echo 'make bench BENCH=NAME, where NAME is one of:' \
	  $$(cd tests/benchmarks 2>/dev/null && grep -ls __main__ -- *.py | sed 's/\.py$$//') >&2; exit 2; }
	@mkdir -p build/bench
	@$(BIN)/python -m tests.benchmarks.$(BENCH) $(ARGS)

servers:
	@.ci/install rabbitmq-server redis-server

# What tests look at pages, units of systemd and rules of Prometheus with.
programs:
	@.ci/install chromium systemd prometheus

generated: $(VENV)/dev.stamp
	@mkdir -p build && $(BIN)/python -m tests.support.generated
	@$(BIN)/python -m tests.architecture.public_api > build/public_api.txt
	@mv build/public_api.txt tests/architecture/public_api.txt

constraints: $(VENV)/base.stamp
	@rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	@build/constraints/bin/python -m pip --quiet install --upgrade pip hatchling
	@build/constraints/bin/python -m pip --quiet install --no-build-isolation --editable '.[all]' --group dev
	@{ echo '# The versions that the tests ran with. Written by: make constraints'; \
	  build/constraints/bin/python -m pip freeze --all --exclude-editable | grep -v '^setuptools=='; } > build/constraints.txt
	@mv build/constraints.txt constraints.txt

clean:
	@rm -rf $(VENV) build dist

# The virtual environment, in layers: an interpreter with a pip that knows dependency groups, then what the target needs.
$(VENV)/base.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, this is {sys.version}")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/install python3-venv
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) pip hatchling
	@touch $@

$(VENV)/demo.stamp: $(VENV)/base.stamp pyproject.toml
	@echo 'installing what the demo needs into $(VENV)'
	@$(INSTALL) '.[embedded,demo]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp pyproject.toml
	@echo 'installing what the tests and checks need into $(VENV)'
	@$(INSTALL) '.[all]' --group dev
	@touch $@
