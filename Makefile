# Everything goes into .venv; each target makes what it needs first, and a second call is quick.
# Variables: PYTHON (>= 3.11), NP ranks, CONFIG, ARGS for prepare and train (-s section.key=value) and chaos, DATA for quality, NAME and ARGS for bench, WORKERS for scaling, TORCH_INDEX (empty: PyPI, CUDA).

PYTHON ?= python3
NP ?= 2
CONFIG ?= configs/pubmed.yaml
ARGS ?=
DATA ?= ../shared/data/pubmed-temporal
SEEDS ?= 3
NAME ?= throughput
WORKERS ?= 1 2 4
# TORCH_INDEX reaches docker/install.py through the environment; its default, PyTorch's public CPU index, is there.

VENV := .venv
BIN := $(abspath $(VENV))/bin
# The environment is made by a Python that is not its own.
SYSTEM_PATH := $(PATH)
export PATH := $(BIN):$(PATH)
INSTALL_INPUTS := pyproject.toml constraints.txt $(wildcard docker/*.py docker/*.patch)
RUN_READY := $(VENV)/.ready-run
TEST_READY := $(VENV)/.ready-test

.PHONY: train test quick chaos check quality bench-setup bench scaling clean help

train: $(RUN_READY) ## train PubMed's citations on NP ranks of this machine, from nothing
	@python -m horovod_trainer prepare -c $(CONFIG) $(ARGS)
	@python -m horovod_trainer launch -- horovodrun --gloo -np $(NP) python -m horovod_trainer train -c $(CONFIG) $(ARGS)

test: $(TEST_READY) ## lint, types, layers, spelling and all tests, timed
	@.ci/checks tests

quick: $(TEST_READY) ## the fast tests only
	@python -m pytest -q -m "not slow" tests/unit

chaos: $(TEST_READY) ## kill saves and ranks, cut links, feed bad input, long; the last line is one JSON object
	@python -m tests.chaos $(ARGS)

check: $(RUN_READY) ## what this machine and build can do, and what to fix
	@python -m horovod_trainer check

quality: $(RUN_READY) ## train DATA with SEEDS seeds on 2 ranks; the last line is one JSON object
	@python benchmarks/quality.py --data $(DATA) --num-proc 2 --seeds $(SEEDS)

bench-setup: $(RUN_READY) ## build the peers' environment and the big graph, once, outside the clone (an hour on 2 cores)
	@python -m benchmarks.setup_peers
	@python -m horovod_trainer prepare -c benchmarks/citation2-size.yaml -s data.store="$$(python -m benchmarks.cache)/store"
	@python -m benchmarks.make_csv

bench: $(RUN_READY) ## run benchmark NAME: throughput time_to_quality memory evaluate prepare scaling startup
	@python -m benchmarks.$(subst -,_,$(NAME)) $(ARGS)

scaling: $(RUN_READY) ## train on WORKERS ranks in turn, against the ceiling and a model of more
	@python -m benchmarks.scaling --workers "$(WORKERS)"

$(RUN_READY): $(INSTALL_INPUTS)
	@export PATH="$(SYSTEM_PATH)"; python=$$(docker/find_python.sh $(PYTHON)) && "$$python" -m docker.install --extras horovod,data
	@touch $@

$(TEST_READY): $(INSTALL_INPUTS)
	@export PATH="$(SYSTEM_PATH)"; python=$$(docker/find_python.sh $(PYTHON)) && "$$python" -m docker.install --extras horovod,data,cluster,ansible,dev
	@touch $(RUN_READY) $@

clean: ## remove the environment and the tools' caches; data, runs and the Horovod wheel stay
	rm -rf $(VENV) $(VENV).log build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
