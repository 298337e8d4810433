#!/usr/bin/env bash
# The four train_NAME.sh at toy size, in minutes on a CPU: does everything still fit together? Nothing it says is a result.
# DEMOS as for Push-T; TOY is the folder for everything (runs/rehearsal).
set -euo pipefail
cd "$(dirname "$0")/.."
toy=${TOY:-runs/rehearsal}
export PRESET=debug EPISODES=20 RESOLUTION=28 STEPS=4 EVAL_EPISODES=4
for name in tworoom pusht reacher cube; do
    actions=$([[ $name == cube ]] && echo 5 || echo 2)
    SECONDS=0
    DATA=$toy/$name.h5 RUN=$toy/runs/$name OUT=$toy/pretrained/$name \
        "runs/train_$name.sh" --method.action-dim "$actions"
    echo "$name: $SECONDS s"
done
