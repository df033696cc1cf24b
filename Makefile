# Everything runs in a virtual environment of its own, made on first use.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow soak lint types docs pictures clean

demo: $(VENV)/installed  ## Adam and 1-bit Adam on a language model
	$(BIN)/python examples/lm.py

test: lint types $(VENV)/installed  ## what has to pass
	$(BIN)/python -m pytest -n auto

test-slow: $(VENV)/installed  ## also what takes minutes
	$(BIN)/python -m pytest -n auto -m "slow or not slow"

soak: $(VENV)/installed  ## faults of every kind, against a run without
	$(BIN)/python tests/soak.py

lint: $(VENV)/installed
	$(BIN)/ruff check .

types: $(VENV)/installed
	$(BIN)/mypy

docs: $(VENV)/docs  ## the site, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(VENV)/installed  ## those of docs/, computed and drawn anew
	$(BIN)/python docs/pictures.py

clean:
	rm -rf $(VENV) site

$(VENV)/installed: pyproject.toml
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onebit_jax needs Python 3.11 or newer")'
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@
