# Every target works as the first command on a fresh clone: each makes what it needs.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
TORCH := $(VENV)/.torch
STAMP := $(VENV)/.installed
SERVES := $(VENV)/.serves
# Bytecode is kept, though images often forbid it: every one of a hundred child processes would
# compile all modules, and pytest rewrite those of its plugins.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
# Tests that compute: two processes of one thread each, files in order, the long ones first.
PYTEST_X2 := OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder
# Tests that start processes wait for them half of their time: more at once than there are cores.
# What they ask of the clock leaves room for that, and a file has its fleet for itself. The suite of
# the transports runs over Ray, too.
FLEETS_AT_ONCE ?= 2
PYTEST_FLEETS := $(PYTEST) -n $(FLEETS_AT_ONCE) --dist loadfile --no-loadscope-reorder \
  --transport inproc,grpc,shm,ray
FLEETS := tests/chaos tests/integration
# A time limit may be missed because the machine was busy: tests that failed run once more, one at a
# time. A test that fails twice fails.
AGAIN := --last-failed --last-failed-no-failures none

.PHONY: setup setup-serve demo test test-fast test-thorough test-compiled test-ray test-real check format proto generated locks helm browser docs bench compiled clean

setup: $(STAMP)

# What serving on a CPU needs and no more.
setup-serve: $(SERVES)

$(TORCH): pyproject.toml constraints.txt
	@echo "[1/4] creating the virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "pip>=24"
	@echo "[2/4] installing torch (a few hundred MB, or more where only CUDA builds are offered)"
	@$(PIP) $(PIP_ARGS) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(STAMP): $(TORCH)
	@echo "[3/4] installing outrider and its development tools"
	@$(PIP) $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@echo "[4/4] ready"
	@touch $@ $(SERVES)

$(SERVES): $(TORCH)
	@echo "[3/4] installing outrider"
	@$(PIP) $(PIP_ARGS) -c constraints.txt -e ".[cpu]"
	@echo "[4/4] ready: $(BIN)/outrider serve"
	@touch $@

demo: setup
	@$(BIN)/outrider models pull smollm2-135m
	@$(BIN)/outrider generate --prompts deploy/demo-prompts.jsonl --max-tokens 96

# For the tests of the chart, which are skipped where it cannot be had.
helm: setup
	@$(BIN)/python deploy/tools/fetch_helm.py || true

# For the tests of the status page, which are skipped where it cannot be had.
browser: setup
	@$(BIN)/python tools/fetch_browser.py || true

# All test layers but `gpu`: unit, statistical, wire; then integration and chaos.
test: setup helm browser
	@$(BIN)/outrider models pull smollm2-135m
	$(PYTEST_X2) --durations 15 -m "not gpu" tests $(addprefix --ignore=,$(FLEETS)) || \
	  $(PYTEST_X2) -n 0 $(AGAIN) -m "not gpu" tests $(addprefix --ignore=,$(FLEETS))
	$(PYTEST_FLEETS) --durations 15 -m "not gpu" $(FLEETS) || \
	  $(PYTEST_FLEETS) -n 0 $(AGAIN) -m "not gpu" $(FLEETS)

test-fast: setup
	$(PYTEST_X2) -m "not gpu and not slow" tests/unit tests/wire

# The rest of the grids whose corners `make test` runs: no branch, only more values of each.
test-thorough: setup
	$(PYTEST_X2) --thorough -m "thorough and not gpu" tests/unit

# A wheel whose host side of a round is compiled (decision 48), and the suites over it; a test that
# replaces a part of a compiled class is skipped.
compiled: setup
	@rm -rf dist/compiled
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -m pip wheel -q --no-deps -w dist/compiled .
	@ls dist/compiled

UNPACKED := $(CURDIR)/build/compiled
ON_COMPILED := PYTHONSAFEPATH=1 PYTHONPATH=$(UNPACKED)
test-compiled: compiled
	@rm -rf $(UNPACKED)
	@$(BIN)/python -m zipfile -e dist/compiled/*.whl $(UNPACKED)
	$(ON_COMPILED) $(PYTEST_X2) -o pythonpath="$(UNPACKED) ." -m "not gpu" $(addprefix tests/unit/,verifier drafter spec transport engine) tests/wire tests/statistical
	$(ON_COMPILED) $(PYTEST_FLEETS) -o pythonpath="$(UNPACKED) ." -m "not gpu" --transport inproc,grpc,shm $(FLEETS) \
	  $(addprefix --ignore=,$(wildcard tests/integration/test_ray_*.py))

test-ray: setup
	$(PYTEST) --transport ray tests/integration/test_transport_contract.py tests/integration/test_transport_bundles.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy outrider drafter/outrider_drafter verifier/outrider_verifier router/outrider_router tools
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/buf lint proto

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup
	PYTHON=$(abspath $(BIN))/python sh proto/generate.sh

# What is written by the code and committed: a test says when it is out of date.
generated: setup
	for process in router verifier drafter ray; do \
	  $(BIN)/outrider config schema $$process > deploy/configs/$$process.schema.json || exit 1; done
	$(BIN)/outrider config reference > docs/configuration.md
	$(BIN)/python deploy/tools/values_schema.py > deploy/helm/outrider/values.schema.json
	$(BIN)/python deploy/tools/prometheus_rule.py > deploy/k8s/components/monitoring/prometheus-rule.yaml
	$(BIN)/python deploy/tools/prometheus_rule.py --groups > deploy/helm/outrider/files/rules.yaml
	cp deploy/monitoring/grafana/outrider.json deploy/helm/outrider/files/outrider.json
	$(BIN)/python tools/decisions.py > docs/decisions/README.md
	$(BIN)/python tools/licences.py > docs/licences.md

# What the images install, with hashes (deploy/locks): after a change of pyproject.toml or constraints.txt.
locks: setup
	@$(PIP) uv==0.13.9
	$(BIN)/python deploy/tools/image_locks.py

# The documentation, into build/site; a test builds it too.
docs: setup
	$(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/outrider bench local

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
