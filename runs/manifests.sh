#!/usr/bin/env bash
# The frozen evaluation pairs that come with the package. Made once: changing them changes every published number.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python - <<'PY'
from pathlib import Path
from lewm.evaluate.manifest import build_manifest

build_manifest("tworoom", count=200, goal_offset=25, path=Path("lewm/evaluate/manifests/tworoom.json"))
PY
