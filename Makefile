# What a person types. `make` alone says what there is.

# A Python 3.11 to make the environment with; everything else runs inside .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv/bin
SOURCES := proto server client connector demo scripts tests benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format proto docs browser picture drills test-tpu test-gpu bench bench-peers

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: ## environment in .venv; instant when nothing changed
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: Python 3.11 or newer is needed; found: $(PYTHON)" >&2; exit 2; }
	@$(PYTHON) scripts/setup_env.py

demo: setup ## two engine processes, one cache: the second takes the prompt from kvhost
	@$(VENV)/python -m demo

test: setup ## every test, those with real engines included
	@$(VENV)/python -m pytest $(PYTEST_ARGS)

lint: setup ## ruff, formatting, mypy --strict
	@$(VENV)/ruff check $(SOURCES)
	@$(VENV)/ruff format --check $(SOURCES)
	@$(VENV)/mypy server client connector scripts demo benchmarks

format: setup ## let ruff mend what it can
	@$(VENV)/ruff check --fix $(SOURCES)
	@$(VENV)/ruff format $(SOURCES)

proto: setup ## generated modules from the .proto files
	@$(VENV)/python -m scripts.gen_proto
	@$(VENV)/python -m tests.proto.field_numbers

docs: setup ## generated pages and the dashboard from the code, and all of docs/ as a site in build/site
	@$(VENV)/python -m scripts.configuration_page
	@$(VENV)/python -m scripts.metrics_page
	@$(VENV)/python -m scripts.dashboard
	@$(VENV)/python -m scripts.site

browser: ## Debian's Chromium, in which the tests look at the daemon's web page (needs root)
	@command -v chromium >/dev/null || { apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }

picture: setup ## docs/images/console.png: the web page, photographed
	@$(VENV)/python -m scripts.console_picture

drills: setup ## the long form of every fault drill; results in build/drills.jsonl
	@KVHOST_DRILLS=long KVHOST_MODEL_STEPS=100000 \
		$(VENV)/python -m pytest -o timeout=3600 tests/drills tests/server/test_manager_model.py $(PYTEST_ARGS)

test-tpu: setup ## tpu-inference's engine on JAX CPU devices (Python 3.12; the first time 11 GB, 5 minutes)
	@$(VENV)/python -m scripts.test_tpu $(PYTEST_ARGS)

# In a Python that has torch for the GPU, numpy, pytest, grpcio and protobuf: `make setup` brings torch for the CPU.
GPU_PYTHON ?= python3

test-gpu: ## tests on a CUDA device, figures as JSON (GPU_PYTHON=...); fails where there is none
	@$(GPU_PYTHON) -m tests.gpu $(PYTEST_ARGS)

bench: setup ## what kvhost costs and brings, in 5 to 6 minutes; FULL=1 for every size, ONLY=NAME for one
	@$(VENV)/python -m benchmarks $(if $(FULL),--full) $(if $(ONLY),--only $(ONLY))

bench-peers: setup ## kvhost beside other caches in one run, each from PyPI on first use; FULL=1, ONLY=NAME
	@$(VENV)/python -m benchmarks.peers $(if $(FULL),--full) $(if $(ONLY),--only $(ONLY))
