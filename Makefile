# Needs Python 3.11 or newer, make and the network; everything else goes into .venv.
#
# The environment is made once, and again when pyproject.toml or constraints.txt change. `make demo`
# installs what the demo needs, the other targets add the development tools to the same .venv, so
# that torch is downloaded and installed once.

PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	command -v $(p) >/dev/null && $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
# Two workers fill two cores; a file's tests stay together, as they share servers. PYTEST_ARGS comes behind:
# `PYTEST_ARGS="-n 0"` runs everything in one process, as `--pdb` needs.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# A run that somebody waits for has eight parameters of each test, and a tenth of the random ones.
SAMPLE := RELIABILITY_SCALE=$${RELIABILITY_SCALE:-0.1}
SAMPLED := --sample 8
PYTEST_ARGS ?=
# Tests start hundreds of processes: without bytecode files each compiles what it imports of our 100,000 lines.
unexport PYTHONDONTWRITEBYTECODE
BENCH_ARGS ?=
# The wheel is the same, byte for byte, wherever a commit is built.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1580601600)
# What runs with the newest and with the oldest dependencies too: wire, contract, training, images, files. Random requests
# and fits, a third of its time, are in `make test-all` alone.
RANGE_TESTS := tests/contract tests/unit/rpc tests/integration/transfer tests/integration/streams/test_streams.py \
	$(addprefix tests/unit/client/_,base page request result transport uploads wire) tests/integration/client/test_page.py \
	tests/unit/decoding/test_pixels.py tests/unit/models/test_preprocessing.py tests/unit/models/weights/test_weights_file.py \
	tests/unit/storage/test_tensor_file.py tests/unit/training/optim/test_optimizers.py \
	$(addprefix tests/unit/training/,files/test_checkpoints.py files/test_export.py step/test_core.py) \
	$(addprefix tests/integration/attacks/test_,bad_input.py image_bombs.py) \
	$(addprefix tests/integration/extraction/test_,extraction.py extraction_images.py numerics.py) \
	$(addprefix tests/integration/open_inference/test_,open_inference.py open_inference_bad_input.py) \
	$(addprefix tests/integration/serving/test_,auth.py health.py metrics.py tls.py traces.py) \
	$(addprefix tests/integration/training/test_,datasets.py trainers.py)

.DEFAULT_GOAL := help
.PHONY: help demo demo-train demo-text test test-changed test-all test-newest test-floors check check-triton bench bench-spool gpu proto page wheel sdist docs notebooks constraints clean

help:  ## Say what there is to make
	@sed -n 's/^\([a-z -]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: .venv/.demo  ## Serve a real pretrained model and look inside it: tables, features and pictures in demo-output/
	$(BIN)/trocar demo --out demo-output

demo-train: .venv/.demo  ## Fine-tune that model on handwritten digits through the service
	$(BIN)/trocar demo train --out demo-output

demo-text: .venv/.demo  ## Serve a real sentence model: which sentences mean the same, and by which tokens
	$(BIN)/trocar demo text --out demo-output

test: .venv/.dev  ## Run the tests, long lists by sample (PYTEST_ARGS="-k name" for some)
	$(SAMPLE) $(BIN)/python $(PYTEST) $(SAMPLED) -m "not whole" $(PYTEST_ARGS)

test-changed: .venv/.dev  ## Run the tests of what differs from the last commit, in minutes (BASE=main for another one)
	$(SAMPLE) $(BIN)/python -m tools.changed_tests $(if $(BASE),--base $(BASE)) -- $(PYTEST) $(SAMPLED) $(PYTEST_ARGS)

test-all: .venv/.dev  ## Run every test with all parameters (RECORD=1: keep which tests reach what, for test-changed)
	$(BIN)/python $(PYTEST) $(if $(RECORD),--record) $(PYTEST_ARGS)

test-newest test-floors: test-%: .venv/.dev  ## Run the parts that dependencies can break, with the newest or the oldest that pip may choose
	$(BIN)/python -m tools.make_environment $*
	$(SAMPLE) .venv-$*/bin/python $(PYTEST) $(SAMPLED) $(RANGE_TESTS) $(PYTEST_ARGS) \
		--ignore-glob='tests/contract/test_random_*' \
		--deselect tests/unit/client/test_package.py::test_the_sync_client_is_fresh  # needs the formatter: make check

check: .venv/.dev  ## Format, lint, types, layers, stubs, the page's bundle, wire contract, Dockerfile, deploy files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	PYTHON=$(CURDIR)/$(BIN)/python proto/generate.sh --check
	$(BIN)/python tools/generate_sync.py --check
	$(MAKE) --no-print-directory page/node_modules/.made
	cd page && PATH=$(CURDIR)/$(BIN):$$PATH npm run --silent generate && npm run --silent check
	$(BIN)/buf lint
	tools/check_breaking.sh $(BIN)/buf
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec $(wildcard deploy/compose*.yaml)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows $(wildcard .github/workflows/*.yml)
	$(BIN)/kubernetes-validate --quiet --strict \
		$(filter-out %/kustomization.yaml %/servicemonitor.yaml,$(wildcard deploy/kubernetes/base/*.yaml)) \
		deploy/kubernetes/ray/cluster.yaml

check-triton: .venv/.dev  ## Try an unmodified tritonclient on the server, in an environment of its own
	tools/check_triton.sh $(BIN)/python

bench: .venv/.dev  ## Measure everything, also against other servers, and write docs/performance.md (BENCH_ARGS="serving --quick" for some)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.docs

# GPU_PYTHON=python3 takes an interpreter that has the packages already, on a machine without a network.
gpu: $(if $(GPU_PYTHON),,.venv/.dev)  ## On a machine with a CUDA device: its tests, tables and profiles, into gpu-results/
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu_run gpu-results

bench-spool: .venv/.dev  ## Measure a training step with the spool against the other ways
	$(BIN)/python -m benchmarks.spool

proto: .venv/.dev  ## Generate the stubs from the .proto files
	PYTHON=$(CURDIR)/$(BIN)/python proto/generate.sh

page: page/node_modules/.made  ## Build the web page into the client's package (client/trocar/_page/static)
	cd page && PATH=$(CURDIR)/$(BIN):$$PATH npm run --silent generate && npm run --silent build

wheel: .venv/.dev  ## Build the wheel, compare it with a second build, and try it in an empty environment, as client and as server
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist .
	tools/check_wheel.sh dist/*.whl

sdist: .venv/.dev  ## Build the source archive
	$(BIN)/python -m build --sdist --outdir dist .

docs: .venv-docs/.made  ## Build the site of docs/ into site/, strictly: open site/index.html, no server is needed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

NOTEBOOKS ?= $(wildcard notebooks/*.ipynb)
notebooks: .venv-notebooks/.made  ## Run the notebooks and store them with their outputs (NOTEBOOKS=notebooks/9-generate.ipynb for one)
	.venv-notebooks/bin/python -m tools.run_notebooks $(NOTEBOOKS)

constraints: .venv/.dev  ## Write constraints.txt from what is installed, once the tests pass with it, and requirements.lock
	tools/write_constraints.sh $(BIN)/python
	$(BIN)/python -m tools.write_lock

clean:  ## Remove what was made, except .venv
	rm -rf dist site demo-output .venv-triton .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
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

page/node_modules/.made: page/package-lock.json
	cd page && npm ci --no-audit --no-fund --silent
	@touch $@

# Nothing of Trocar is installed there: sources are read, not imported.
.venv-docs/.made: tools/site_requirements.txt | .venv/bin/python
	rm -rf .venv-docs
	.venv/bin/python -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check --quiet --requirement tools/site_requirements.txt
	@touch $@

# Jupyter's kernel beside the packages of .venv, which it sees; editable installs are found by their .pth files.
.venv-notebooks/.made: tools/notebook_requirements.txt .venv/.dev
	rm -rf .venv-notebooks
	.venv/bin/python -m venv .venv-notebooks
	.venv-notebooks/bin/python -m pip install --disable-pip-version-check --quiet --requirement tools/notebook_requirements.txt
	folder() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	echo "import site; site.addsitedir('$$(folder .venv/bin/python)')" > "$$(folder .venv-notebooks/bin/python)/packages.pth"
	@touch $@
