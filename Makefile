PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
LLAMA_INDEX := .venv-llama-index

.PHONY: install install-dev up test test-clients check fuzz bench clean

# A stamp per kind of install, so that repeated `make` calls cost nothing and a changed pyproject reinstalls.
$(VENV)/.up: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded]'
	touch $@

$(VENV)/.dev: $(VENV)/.up
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,dev]'
	touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	touch $@

$(LLAMA_INDEX)/.installed: tests/clients/llama_index.txt
	$(PYTHON) -m venv $(LLAMA_INDEX)
	$(LLAMA_INDEX)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

install: $(VENV)/.up

install-dev: $(VENV)/.dev

up: install
	$(BIN)/tritongate up

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# First what needs no server, a third of which is waiting. Then what starts the real Triton; that goes on whatever the first
# showed. What serves end to end are child processes, which coverage does not count; tracing would only slow their clients.
test: check
	status=0; \
	$(BIN)/python -m pytest -m 'not e2e' --numprocesses 3 --dist worksteal --cov --cov-report=term:skip-covered || status=$$?; \
	$(BIN)/python -m pytest -m e2e --numprocesses 3 --dist loadfile || status=$$?; \
	exit $$status

# LangChain and agents in an environment of their own, and LlamaIndex, which wants an older OpenAI SDK, in another; both
# against the stack of the first. The tests' common conftest needs what only `make test` has.
test-clients: install $(CLIENTS)/.installed $(LLAMA_INDEX)/.installed
	STACK_COMMAND=$(BIN)/tritongate $(CLIENTS)/bin/python -m pytest --confcutdir=tests/clients tests/clients
	STACK_COMMAND=$(BIN)/tritongate $(LLAMA_INDEX)/bin/python -m pytest --confcutdir=tests/clients tests/clients

# Of each of the eight operations with a body 125 right requests and 125 wrong ones.
fuzz: install-dev
	FUZZ_CASES=125 $(BIN)/python -m pytest tests/gateway/api/test_fuzz.py tests/e2e/test_fuzz.py

bench: install-dev
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) $(CLIENTS) $(LLAMA_INDEX) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
