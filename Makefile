# Each target creates the virtual environment and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-long check docs bench-plan bench-step figures notebooks clean

$(VENV)/installed: pyproject.toml reproduction/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e reproduction
	touch $@

$(VENV)/for-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report,sklearn]'
	touch $@

demo: $(VENV)/for-demo  ## compare the methods on embedded data; print a table and write a report
	$(BIN)/ownerwise demo

test: $(VENV)/installed check  ## linters, types and the test suite
	$(BIN)/pytest --numprocesses auto --dist worksteal

test-long: $(VENV)/installed  ## the same properties with many more random cases
	$(BIN)/pytest --numprocesses auto --dist worksteal -m 'long or not long'

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(VENV)/installed  ## build the documentation site in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench-plan: $(VENV)/installed
	$(BIN)/python benchmarks/plan.py

bench-step: $(VENV)/installed
	$(BIN)/python benchmarks/step.py --quick

figures: $(VENV)/installed
	$(BIN)/python docs/figures/plan.py

notebooks: $(VENV)/installed  ## run the notebooks and store their outputs
	$(BIN)/jupyter execute --inplace notebooks/*.ipynb

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
