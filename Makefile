# Everything starts here: each target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-gpu lint format clean

demo: .venv/installed
	$(BIN)/lewm demo

test: .venv/installed-dev
	./scripts/test-packages.sh
	$(MAKE) --no-print-directory lint
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: .venv/installed-dev
	$(BIN)/pytest -n 2 -m slow

# Everything that needs CUDA. It installs nothing: machines with a GPU bring their own torch.
test-gpu:
	PYTHON=$(PYTHON) ./scripts/test-gpu.sh

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

# Public implementations are installed without their dependencies: the parity tests load only parts of them.
.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,mujoco,lerobot,dino,efficientnet,understand,parity]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps stable-worldmodel gym-pusht
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
