# Two commands do everything: `make demo` trains the default run, `make test` checks the project.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test strategies lint types clean

demo: .venv/installed
	$(BIN)/python cli.py fit --config grpo_pg.yaml

test: .venv/installed lint types
	$(BIN)/python -m pytest

# Trains under every strategy, beside a single process: about a quarter of an hour.
strategies: .venv/installed
	$(BIN)/python tests/strategies/table.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .cache runs
