PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
LLAMA_INDEX := .venv-llama-index
LINT := .venv-lint
LOCK := .venv-lock
SBOM := .venv-sbom
ONNX := .venv-onnx
VLLM := .venv-vllm

.PHONY: install install-dev up lock lint test test-fast test-clients test-page test-vllm check docs fuzz chaos bench bench-onnx bench-vllm sbom clean

# The Pythons that the wheel's tritonserver has a stub for.
PYTHON_CHECK := import sys; v = sys.version_info; v[:2] in ((3, 11), (3, 12)) or sys.exit("tritongate needs Python 3.11 or 3.12, and $(PYTHON) is %d.%d. Install one of them, such as the system packages python3.12 and python3.12-venv. Then: make up PYTHON=python3.12" % v[:2])

# Without an NVIDIA driver, PyTorch's build for CPUs: hundreds of megabytes instead of gigabytes with the CUDA libraries. uv knows
# where that is; where it cannot be reached, the usual way follows.
DRIVER := /proc/driver/nvidia/version
TORCH_FOR_CPUS = { $(MAKE) --no-print-directory $(LOCK)/.installed && UV_HTTP_TIMEOUT=30 $(LOCK)/bin/uv pip install \
	--python $(BIN)/python --torch-backend cpu "$$(grep '^torch==' constraints.txt)"; }

# A stamp per kind of install, so that repeated `make` calls cost nothing and a changed pyproject reinstalls.
$(VENV)/.up: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(PYTHON_CHECK)'
	$(PYTHON) -m venv $(VENV)
	@test -e $(DRIVER) || $(TORCH_FOR_CPUS) || echo 'There is no PyTorch for CPUs alone to be had: pip takes what it finds.'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[embedded]'
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

# For a CPU: 4 GB and minutes. Four of its packages are built for another torch than the one it brings, and the stub of the
# wheel's tritonserver for numpy 1, so pip's warnings about these are right and without effect.
$(VLLM)/.installed: tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check 'numpy<2'
	touch $@

$(LINT)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lint]'
	touch $@

install: $(VENV)/.up

install-dev: $(VENV)/.dev

up: install
	$(BIN)/tritongate up

$(LOCK)/.installed:
	$(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
	touch $@

# Versions stay as they are where pyproject still allows them; delete constraints.txt first to take the newest.
lock: $(LOCK)/.installed
	$(LOCK)/bin/uv pip compile pyproject.toml --extra embedded --extra dev --universal --python-version 3.11 --quiet \
		--no-annotate --custom-compile-command 'make lock' --output-file constraints.txt

# What needs neither torch nor Triton to be installed: style of everything, types of the gateway and the wire.
lint: $(LINT)/.installed
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/mypy -p gateway -p wire

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# First what needs no server, a third of which is waiting. Then what starts the real Triton, each server once for all tests that
# share it; that goes on whatever the first showed, with fewer workers, each of which has several processes: Triton gives up a
# model's process that does not get to run for a second. CI sets COVERAGE, of the first alone: what serves end to end are child
# processes, which are not counted.
COVERAGE :=
test: check
	status=0; \
	$(BIN)/python -m pytest -m 'not e2e' --numprocesses 4 --dist worksteal $(COVERAGE) || status=$$?; \
	$(BIN)/python -m pytest -m e2e --numprocesses 3 --dist loadgroup --no-loadscope-reorder || status=$$?; \
	exit $$status

# The gateway, the wire and the model's text, without torch, without processes, without thousands of requests: 210 seconds of a
# processor, so about a minute on four cores that are free and two on two.
PROCESSES := not site_builds and not without_an_endpoint and not every_process_finds and not without_the_models_side
FAST := not worker and not server and not fuzz and not garbage and not hostile and $(PROCESSES)
test-fast: install-dev
	$(BIN)/python -m pytest -m 'not e2e' -k '$(FAST)' --numprocesses 3 --dist worksteal \
		tests/gateway tests/wire tests/repo tests/triton_models/text

# LangChain, agents and Anthropic's SDK in an environment of their own, and LlamaIndex, which wants an older OpenAI SDK, in
# another; both against the stack of the first. The tests' common conftest needs what only `make test` has.
test-clients: install $(CLIENTS)/.installed $(LLAMA_INDEX)/.installed
	STACK_COMMAND=$(BIN)/tritongate $(CLIENTS)/bin/python -m pytest --confcutdir=tests/clients tests/clients
	STACK_COMMAND=$(BIN)/tritongate $(LLAMA_INDEX)/bin/python -m pytest --confcutdir=tests/clients tests/clients

# The chat page in a browser, which must be there: Chromium or Chrome. `make test` leaves these tests out where there is none.
test-page: install-dev
	TEST_PAGE=1 $(BIN)/python -m pytest tests/page

# The real vLLM under the real tritonserver. PYTHON must be of the same minor version for both environments.
test-vllm: install-dev $(VLLM)/.installed
	TEST_VLLM=1 $(BIN)/python -m pytest tests/vllm

$(VENV)/.fuzz: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,dev,fuzz]'
	touch $@

# Of each reader of foreign bytes 100,000 inputs, guided by coverage. Then of each of the eight operations with a body 125 right
# requests and 125 wrong ones.
fuzz: $(VENV)/.fuzz
	$(BIN)/python -m bench.fuzz
	FUZZ_CASES=125 FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest tests/gateway/http/test_fuzz.py tests/e2e/test_fuzz.py

# The documents as a site, in build/docs.
docs: install-dev
	$(BIN)/python -m mkdocs build --strict

# Three Tritons are killed, stopped, slowed and cut off at random under mixed clients; 1 if a promise does not hold. SEED repeats a run.
SECONDS := 600
CHAOS_CLIENTS := 200
chaos: install-dev
	$(BIN)/python -m bench.chaos --seconds $(SECONDS) --clients $(CHAOS_CLIENTS) $(if $(SEED),--seed $(SEED))

bench: install-dev
	$(BIN)/python -m bench

# Our engine and vLLM's CPU build on the same random Llamas, one after the other; it needs cores that are free.
bench-vllm: install-dev $(VLLM)/.installed
	for shape in demo:2048 100m:32000; do \
		$(BIN)/python -m bench.vllm_cpu.checkpoint build/llama-$${shape%:*} --shape $${shape%:*} && \
		$(BIN)/python -m bench.gpu.compare build/bench-vllm-$${shape%:*} --checkpoint build/llama-$${shape%:*} --ids-below $${shape#*:} \
			--only other,ours --device cpu --dtype float32 --other bench/vllm_cpu/serve.sh \
			--other-arguments "build/llama-$${shape%:*} --dtype float32" --other-python $(VLLM)/bin/python \
			--ids 64 --out 64 --conc 1,8,32 --processes 1 --limit-s 1500 || exit; \
	done

# It sees the development environment, so that torch, tritonserver and our engine are the same ones.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
$(ONNX)/.installed: bench/onnx/requirements.txt $(VENV)/.dev
	$(BIN)/python -m venv $(ONNX)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" \
		> "$$($(ONNX)/bin/python -c '$(SITE)')/development.pth"
	$(ONNX)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	touch $@

# ONNX Runtime in a Python-backend entry against our engine, on a CPU: 10 GB of memory, 5 GB on the disk, a quarter of an hour.
bench-onnx: $(ONNX)/.installed
	$(ONNX)/bin/python -m bench.onnx

$(SBOM)/.installed:
	$(PYTHON) -m venv $(SBOM)
	$(SBOM)/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7,<8'
	touch $@

# What `make up` installed and the chat page's libraries, with versions and licences, as CycloneDX.
sbom: install $(SBOM)/.installed
	mkdir -p build
	$(SBOM)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom.json $(BIN)/python
	$(BIN)/python -m deploy.sbom build/sbom.json

clean:
	rm -rf $(VENV) $(LINT) $(LOCK) $(SBOM) $(CLIENTS) $(LLAMA_INDEX) $(ONNX) $(VLLM) build *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .coverage
