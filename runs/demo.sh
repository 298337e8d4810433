#!/usr/bin/env bash
# The figures of the README's demo: TwoRoom on the CPU, 50 held-out pairs, seed 0.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/lewm demo --fresh
