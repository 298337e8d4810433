#!/usr/bin/env bash
# Reacher at full size: data, model, its figures on the 200 frozen pairs with each replanning schedule, and pretrained/reacher.
# Arguments go to `lewm train`; runs/lib.sh says what the environment can change.
source "$(dirname "$0")/lib.sh"
: "${EPISODES:=6000}"
pipeline reacher "$@"
