#!/usr/bin/env bash
# Push-T at full size: noisy replays of human demonstrations, model, its figures on the 200 frozen pairs with each
# replanning schedule, and pretrained/pusht. DEMOS names the demonstrations: an .npz file (docs/guide/collect-data.md) or a LeRobot
# dataset. Arguments go to `lewm train`; runs/lib.sh says what the environment can change.
source "$(dirname "$0")/lib.sh"
: "${EPISODES:=20000}" "${STEPS:=30000}"
pipeline pusht "$@"
