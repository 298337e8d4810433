#!/usr/bin/env bash
# The frozen evaluation pairs that come with the package. Made once: changing them changes every published number.
# Push-T's come from replays of held-out demonstrations (docs/guide/collect-data.md says in which form).
set -euo pipefail
cd "$(dirname "$0")/.."
: "${LEWM_PUSHT_DEMOS:?is not set: name the Push-T demonstrations, an .npz file or a LeRobot dataset}"
# Cube's episodes depend on how OpenBLAS rounds (docs/guide/worlds.md). These kernels, for AVX-512, give the frozen pairs.
export OPENBLAS_CORETYPE=SkylakeX
.venv/bin/python - <<'PY'
import os
from pathlib import Path

from lewm.data.formats.demonstrations import load_demonstrations
from lewm.evaluate.manifest import PACKAGED, build_manifest

FOLDER = Path("lewm/evaluate/manifests")
demonstrations = {"pusht": load_demonstrations(os.environ["LEWM_PUSHT_DEMOS"])}
for env in ("tworoom", "pusht", "reacher", "cube"):
    for name, ending in PACKAGED.items():
        path = FOLDER / f"{env}{ending}.json"
        build_manifest(env, 200, 25, path, unsolved_only=name == "strict", demonstrations=demonstrations.get(env))
        print(path)
PY
