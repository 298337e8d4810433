#!/usr/bin/env bash
# What the four models that come with lewm have understood: the numbers of docs/notebook/understanding.md. Each world's page is
# OUT/WORLD/report.html. What was stopped goes on where it was, and what is there is not computed again.
#
# Set in the environment, if wanted:
#   WORLDS      (tworoom pusht reacher cube)
#   EPISODES    held-out episodes to look at, instead of each world's own number
#   OUT         the folder of what is found (runs/understanding)
#   DEMOS       demonstrations to replay, for Push-T: its model knows replays
#   DECODE      steps of a decoder to train in each world; nothing: none is trained
#   DEVICE      (auto)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

declare -A episodes=([tworoom]=1100 [pusht]=800 [reacher]=100 [cube]=200)
for world in ${WORLDS:-tworoom pusht reacher cube}; do
    [[ -n ${episodes[$world]:-} ]] || { echo "WORLDS has $world; there are: tworoom pusht reacher cube" >&2; exit 1; }
    options=(--out "${OUT:-runs/understanding}/$world" --episodes "${EPISODES:-${episodes[$world]}}" --device "${DEVICE:-auto}")
    if [[ $world == pusht ]]; then
        options+=(--demos "${DEMOS:?is not set: name the demonstrations, an .npz file or a LeRobot dataset}")
    fi
    [[ -z ${DECODE:-} ]] || lewm understand decode "$world" "${options[@]}" --train --steps "$DECODE"
    lewm understand "$world" "${options[@]}"
done
