#!/usr/bin/env bash
# Push-T at full size: noisy replays of human demonstrations, model, and its figures on the 200 frozen pairs.
# DEMOS names the demonstrations: an .npz file (docs/data.md) or a LeRobot dataset. Without it a scripted expert pushes.
# On one GPU; `LAUNCH="torchrun --nproc-per-node 8 -m lewm" runs/train_pusht.sh` uses eight.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
lewm collect pusht --episodes 10000 --frame-stride 5 ${DEMOS:+--demos "$DEMOS"} --out data/pusht.h5
${LAUNCH:-lewm} train pusht --data data/pusht.h5 --out runs/pusht "$@"
for schedule in whole shrinking soonest; do
    lewm eval runs/pusht --eval.episodes 200 --plan.schedule "$schedule" --out "runs/pusht_$schedule.json"
done
