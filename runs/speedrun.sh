#!/usr/bin/env bash
# Push-T in two minutes of training on an H200, three seeds (docs/notebook/speedrun.md): minutes by the clock, success with two schedules.
# DEMOS names the demonstrations. EPISODES (10000), RESOLUTION (224) and DATA are those of the dataset, OUT (runs/speedrun) is the
# folder of the runs; arguments go to benchmarks/speedrun.py.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
data=${DATA:-data/pusht_speedrun.h5}
lewm collect pusht --episodes "${EPISODES:-10000}" --resolution "${RESOLUTION:-224}" --frame-stride 5 --out "$data" \
    --demos "${DEMOS:?is not set: name the demonstrations, an .npz file or a LeRobot dataset}"
python benchmarks/speedrun.py --data "$data" --out "${OUT:-runs/speedrun}" --steps 6000 --checkpoints 1 \
    --schedules shrinking whole "$@" -- --loader.threads "$(nproc)"
