#!/usr/bin/env bash
# Reacher at full size: data, model, and its figures on the 200 frozen pairs with each replanning schedule.
# On one GPU; `LAUNCH="torchrun --nproc-per-node 8 -m lewm" runs/train_reacher.sh` uses eight.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
lewm collect reacher --episodes 10000 --frame-stride 5 --out data/reacher.h5
${LAUNCH:-lewm} train reacher --data data/reacher.h5 --out runs/reacher "$@"
for schedule in whole shrinking soonest; do
    lewm eval runs/reacher --eval.episodes 200 --plan.schedule "$schedule" --out "runs/reacher_$schedule.json"
done
