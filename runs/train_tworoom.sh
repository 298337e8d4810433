#!/usr/bin/env bash
# TwoRoom at full size: data, model, and its figures on the 200 frozen pairs with each replanning schedule.
# On one GPU; `LAUNCH="torchrun --nproc-per-node 8 -m lewm" runs/train_tworoom.sh` uses eight.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
lewm collect tworoom --episodes 10000 --frame-stride 5 --out data/tworoom.h5
${LAUNCH:-lewm} train tworoom --data data/tworoom.h5 --out runs/tworoom "$@"
for schedule in whole shrinking soonest; do
    lewm eval runs/tworoom --eval.episodes 200 --plan.schedule "$schedule" --out "runs/tworoom_$schedule.json"
done
