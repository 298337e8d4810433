"""`make test-gpu` never takes a machine without a GPU for one on which everything is well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "test-gpu.sh"
without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="with a device, it would begin")


def run(python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT], env=os.environ | {"PYTHON": python}, capture_output=True, text=True)


@without_device
def test_without_a_device_there_is_nothing_to_test():
    done = run(sys.executable)
    assert done.returncode == 1
    assert "sees no CUDA device: there is nothing to test." in done.stderr
    assert done.stdout == ""


@without_device
def test_a_python_without_packages_is_told_which(tmp_path: Path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')  # without what is installed
    bare.chmod(0o755)
    done = run(str(bare))
    assert done.returncode == 1
    assert "has no torch, numpy" in done.stderr
    assert "PYTHON=" in done.stderr


def test_it_looks_where_such_tests_are():
    tests = SCRIPT.parents[1] / "tests"
    marked = {path.parent.name for path in tests.rglob("test_*.py") if "mark.cuda" in path.read_text()} - {"cuda"}
    assert marked == {"kernels"}
    assert "tests/cuda tests/kernels" in SCRIPT.read_text()
