#!/usr/bin/env bash
# Everything that needs CUDA, and how long it took. Taken is the Python of .venv or else $PYTHON (python3), whichever first
# has all packages and sees a GPU. Nothing is installed: where there is no network, PYTHONPATH may name a folder of packages.
set -u
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
check() {
    "$1" - << 'CHECK'
import importlib.util
import sys

needed = ("torch", "numpy", "pytest")
# By module, what pip calls the rest: without them, tests that need them fail.
others = {name: name for name in ("gymnasium", "pymunk", "h5py", "isal", "deflate", "safetensors", "tyro", "rich")}
others |= {"cv2": "opencv-python-headless", "PIL": "pillow", "matplotlib": "matplotlib", "tensorboard": "tensorboard"}
others |= {"huggingface_hub": "huggingface_hub"}
missing = [module for module in needed if not importlib.util.find_spec(module)]
lacking = [package for module, package in others.items() if not importlib.util.find_spec(module)]
if missing:
    remedy = "Set up .venv with `make .venv/installed-dev`, or install them and name that Python with PYTHON=..."
    sys.exit(f"{sys.executable} has no {', '.join([*missing, *lacking])}. {remedy}")
import torch

if not torch.cuda.is_available():
    sys.exit(f"{sys.executable} (torch {torch.__version__}) sees no CUDA device: there is nothing to test.")
if lacking:
    print(f"Not installed: {', '.join(lacking)}. Tests that need them fail.")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
CHECK
}
python=
for candidate in .venv/bin/python "${PYTHON:-python3}"; do
    command -v "$candidate" > /dev/null && check "$candidate" && python=$candidate && break
done
[ -n "$python" ] || { echo "No Python fits; choose one with PYTHON=..." >&2; exit 1; }
started=$SECONDS
# In two folders: others need packages that a machine with a GPU may not have.
"$python" -m pytest -m cuda tests/cuda tests/kernels --durations=10 -p no:cacheprovider "$@"
status=$?
echo "Tests on the GPU took $((SECONDS - started)) s."
exit $status
