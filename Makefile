# Every target makes what it needs in a fresh clone: a virtual environment in .venv, the demo's database in .demo.
# Compiled kernels lie in the user's cache folder, where every clone finds them.
PYTHON ?= python3
BIN := .venv/bin
# Kernels are compiled in every process that needs them first: neighbours in a file stay together.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test interop test-cuda-libs lint bench compare clean

demo: .venv/installed
	@mkdir -p .demo
	@NBDNN_DB=.demo/tuning.db $(BIN)/python examples/resnet50.py

test: .venv/installed-dev
	$(PYTEST)

# The tests of PyTorch and JAX arrays, which `make test` leaves out where those are not installed.
interop: .venv/installed-interop
	NBDNN_TEST_LIBRARIES=all $(PYTEST) -m 'interop and not gpu and not slow'

# What can be tested of CUDA without a GPU, and `make test` leaves out: kernels compiled for every architecture, and
# cuDNN's own library.
test-cuda-libs: .venv/installed-cuda-libs
	NBDNN_TEST_LIBRARIES=all $(PYTEST) -m 'cuda_libs and not gpu and not slow'

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-dev
	$(BIN)/python -m pytest -c bench/pytest.ini bench

# PyTorch is the yardstick here and a dependency of nothing else.
compare: .venv/installed-interop
	$(BIN)/python bench/compare_torch.py
	$(BIN)/python bench/compare_torch_ops.py
	$(BIN)/python bench/compare_torch_rnn.py

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

.venv/installed-interop: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[interop]'
	@touch $@

.venv/installed-cuda-libs: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[dev,cuda13]'
	@touch $@
