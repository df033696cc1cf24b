# Everything runs in a virtual environment of its own, made on first use.
VENV ?= .venv
BIN := $(VENV)/bin
LOWEST := $(VENV)-lowest

.PHONY: demo test test-lowest test-slow soak lint types dist clean

demo: $(VENV)/installed  ## Adam and 1-bit Adam on a language model
	$(BIN)/python examples/lm.py

test: lint types $(VENV)/installed  ## what has to pass
	$(BIN)/python -m pytest -n auto

test-lowest: $(LOWEST)/installed  ## with the lowest versions of everything that it needs
	$(LOWEST)/bin/python -m pytest -n auto

test-slow: $(VENV)/installed  ## also what takes minutes
	$(BIN)/python -m pytest -n auto -m "slow or not slow"

soak: $(VENV)/installed  ## faults of every kind, against a run without
	$(BIN)/python tests/soak.py

lint: $(VENV)/installed
	$(BIN)/ruff check .

types: $(VENV)/installed
	$(BIN)/mypy

dist: $(VENV)/installed  ## wheel and sdist, each tried where nothing else is installed
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python tests/installed.py dist

clean:
	rm -rf $(VENV) $(LOWEST) dist

$(VENV)/installed: pyproject.toml
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onebit_jax needs Python 3.11 or newer")'
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(LOWEST)/installed: pyproject.toml
	python3 -m venv $(LOWEST)
	python3 tests/lowest.py >$(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable '.[dev]'
	touch $@
