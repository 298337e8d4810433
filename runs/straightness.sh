#!/usr/bin/env bash
# How straight latent paths become over training in Push-T, LeWM beside PLDM, in small models of small frames: the figure of
# docs/notebook/understanding.md. Ten minutes on two CPU cores. What was stopped goes on where it was.
#
# Set in the environment, if wanted:
#   DEMOS            demonstrations to replay (needed)
#   EPISODES, STEPS  of data (1500) and of each training (3000)
#   OUT              the folder of data, runs and findings (runs/straightness)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
out=${OUT:-runs/straightness}

lewm collect pusht --episodes "${EPISODES:-1500}" --resolution 56 --frame-stride 5 --out "$out/data.h5" \
    --demos "${DEMOS:?is not set: name the demonstrations, an .npz file or a LeRobot dataset}"
train() { # NAME [options]
    lewm train demo --env pusht --data "$out/data.h5" --out "$out/$1" --train.steps "${STEPS:-3000}" "${@:2}"
}
train lewm
train pldm --method pldm --method.variant authors
train pldm-similarity --method pldm --method.variant authors --method.weights.similarity 5
lewm understand straightness "LeWM=$out/lewm" "PLDM=$out/pldm" "PLDM, similarity 5=$out/pldm-similarity" --out "$out/found"
