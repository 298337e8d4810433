#!/usr/bin/env bash
# Pairs to choose settings on, which share no episode with the frozen ones (docs/guide/compare.md):
#   runs/tuning_manifests.sh ENV COUNT FOLDER
# writes FOLDER/ENV_tuning.json and FOLDER/ENV_tuning_strict.json, of COUNT pairs each. Push-T's come from replays of
# held-out demonstrations, as in runs/manifests.sh.
set -euo pipefail
usage="usage: runs/tuning_manifests.sh ENV COUNT FOLDER"
env=${1:?$usage} count=${2:?$usage} folder=${3:?$usage}
if [[ $env == pusht ]]; then
    : "${LEWM_PUSHT_DEMOS:?is not set: name the Push-T demonstrations, an .npz file or a LeRobot dataset}"
fi
PATH="$(cd "$(dirname "$0")/.." && pwd)/.venv/bin:$PATH"
mkdir -p "$folder"
python - "$env" "$count" "$folder" <<'PY'
import os
import sys
from pathlib import Path

from lewm.data.formats.demonstrations import load_demonstrations
from lewm.errors import LewmError
from lewm.evaluate.manifest import PACKAGED, TUNING_EPISODE, build_manifest

env, folder = sys.argv[1], Path(sys.argv[3])
try:
    count = int(sys.argv[2])
    demonstrations = load_demonstrations(os.environ["LEWM_PUSHT_DEMOS"]) if env == "pusht" else None
    for name, ending in PACKAGED.items():
        path = folder / f"{env}_tuning{ending}.json"
        build_manifest(env, count, 25, path, name == "strict", demonstrations, first_episode=TUNING_EPISODE)
        print(path)
except (LewmError, ValueError) as error:
    sys.exit(f"Error: {error}")
PY
