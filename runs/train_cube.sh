#!/usr/bin/env bash
# OGBench-Cube at full size: data, model, and its figures on the 200 frozen pairs with each replanning schedule.
# On one GPU; `LAUNCH="torchrun --nproc-per-node 8 -m lewm" runs/train_cube.sh` uses eight.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
lewm collect cube --episodes 10000 --frame-stride 5 --out data/cube.h5
${LAUNCH:-lewm} train cube --data data/cube.h5 --out runs/cube "$@"
for schedule in whole shrinking soonest; do
    lewm eval runs/cube --eval.episodes 200 --plan.schedule "$schedule" --out "runs/cube_$schedule.json"
done
