#!/usr/bin/env bash
# The figures of docs/notebook/schedules.md, with the demo's model, and of docs/notebook/planning-speed.md. The latter want a
# GPU and the public solver: pip install --no-deps stable-worldmodel einops loguru.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/lewm demo
.venv/bin/python benchmarks/solvers.py --model runs/demo/training --episodes 50
.venv/bin/python benchmarks/plan.py
