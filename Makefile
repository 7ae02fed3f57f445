# Needs Python 3.11 or newer, make and the network; everything else goes into .venv.
#
# The environment is made once, and again when pyproject.toml or constraints.txt change. `make demo`
# installs what the demo needs, the other targets add the development tools to the same .venv, so
# that torch is downloaded and installed once.

PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	command -v $(p) >/dev/null && $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
PYTEST_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-train test check check-triton bench bench-spool proto wheel constraints clean

help:  ## Say what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: .venv/.demo  ## Serve a real pretrained model and look inside it: tables, features and pictures in demo-output/
	$(BIN)/trocar demo --out demo-output

demo-train: .venv/.demo  ## Fine-tune that model on handwritten digits through the service
	$(BIN)/trocar demo-train --out demo-output

test: .venv/.dev  ## Run every test (PYTEST_ARGS="-k name" for some)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: .venv/.dev  ## Format, lint, types, layers, stubs, wire contract, Dockerfile, deploy files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	PYTHON=$(CURDIR)/$(BIN)/python proto/generate.sh --check
	$(BIN)/python tools/generate_sync.py --check
	$(BIN)/buf lint
	tools/check_breaking.sh $(BIN)/buf
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec $(wildcard deploy/compose*.yaml)
	$(BIN)/kubernetes-validate --quiet --strict \
		$(filter-out %/kustomization.yaml %/servicemonitor.yaml,$(wildcard deploy/kubernetes/base/*.yaml))

check-triton: .venv/.dev  ## Try an unmodified tritonclient on the server, in an environment of its own
	tools/check_triton.sh $(BIN)/python

bench: .venv/.dev  ## Measure everything, also against other servers, and write docs/performance.md (BENCH_ARGS="serving --quick" for some)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.docs

bench-spool: .venv/.dev  ## Measure a training step with the spool against the other ways
	$(BIN)/python -m benchmarks.spool

proto: .venv/.dev  ## Generate the stubs from the .proto files
	PYTHON=$(CURDIR)/$(BIN)/python proto/generate.sh

wheel: .venv/.dev  ## Build the wheel and try it in an empty environment, as client and as server
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist .
	tools/check_wheel.sh dist/*.whl

constraints: .venv/.dev  ## Write constraints.txt from what is installed, once the tests pass with it
	tools/write_constraints.sh $(BIN)/python

clean:  ## Remove what was made, except .venv
	rm -rf dist demo-output .venv-triton .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find proto service client tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Trocar needs Python 3.11 or newer; none was found. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing Trocar and what the demo needs into .venv (with PyTorch: minutes on a slow line, once)"
	$(PIP_INSTALL) --editable '.[demo]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing Trocar, what the tests need and the checkers into .venv (with PyTorch: minutes on a slow line, once)"
	$(PIP_INSTALL) --editable '.[dev]'
	@touch .venv/.demo $@
