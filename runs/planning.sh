#!/usr/bin/env bash
# The figures of docs/planning.md. The tables of solvers and schedules use the demo's model; the speed table wants a GPU
# and the public solver: pip install --no-deps stable-worldmodel einops loguru.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/lewm demo
.venv/bin/python benchmarks/solvers.py --model runs/demo/training --episodes 50
.venv/bin/python benchmarks/plan.py
