# Every target makes what it needs in a fresh clone: a virtual environment in .venv, the demo's database in .demo.
# Compiled kernels lie in the user's cache folder, where every clone finds them.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench compare clean

demo: .venv/installed
	@mkdir -p .demo
	@NBDNN_DB=.demo/tuning.db $(BIN)/python examples/resnet50.py

test: .venv/installed-dev
	$(BIN)/python -m pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-dev
	$(BIN)/python -m pytest -c bench/pytest.ini bench

# PyTorch is the yardstick here and a dependency of nothing else.
compare: .venv/installed-torch
	$(BIN)/python bench/compare_torch.py

clean:
	rm -rf .venv .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ .venv/installed

.venv/installed-torch: .venv/installed-dev
	$(BIN)/python -m pip install --quiet torch
	@touch $@
