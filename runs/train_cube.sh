#!/usr/bin/env bash
# OGBench-Cube at full size: data, model, its figures on the 200 frozen pairs with each replanning schedule, and pretrained/cube.
# Arguments go to `lewm train`; runs/lib.sh says what the environment can change.
source "$(dirname "$0")/lib.sh"
: "${EPISODES:=16000}" "${EXPLORATION:=0.6}" "${MISTAKES:=0.7}"
pipeline cube "$@"
