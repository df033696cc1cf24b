# Everything runs in a virtual environment of its own, made on first use.
VENV ?= .venv
BIN := $(VENV)/bin
LOWEST := $(VENV)-lowest

.PHONY: demo test test-lowest test-slow soak study study-small lint types docs pictures dist clean

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

study: $(VENV)/installed  ## hours, as root: time to the same loss on slow links, and what breaks
	$(BIN)/python examples/study.py $(if $(DATA),--data $(DATA))
	$(BIN)/python examples/ngram_lm.py --steps 10000 \
		--optimizer adam --optimizer onebit_adam --optimizer bf16_exact
	$(BIN)/python examples/hazards.py

study-small: $(VENV)/installed  ## the same in minutes
	$(BIN)/python examples/study.py --small
	$(BIN)/python examples/hazards.py --steps 100

lint: $(VENV)/installed
	$(BIN)/ruff check .

types: $(VENV)/installed
	$(BIN)/mypy

docs: $(VENV)/docs  ## the site, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(VENV)/installed  ## those of docs/, computed and drawn anew
	$(BIN)/python docs/pictures.py

dist: $(VENV)/installed  ## wheel and sdist, each tried where nothing else is installed
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python tests/installed.py dist

clean:
	rm -rf $(VENV) $(LOWEST) dist site

$(VENV)/installed: pyproject.toml
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onebit_jax needs Python 3.11 or newer")'
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(LOWEST)/installed: pyproject.toml
	python3 -m venv $(LOWEST)
	python3 tests/lowest.py >$(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable '.[dev]'
	touch $@
