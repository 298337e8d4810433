"""The README's example runs as it stands, and its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lewm.cli import VERBS

README = (Path(__file__).parents[2] / "README.md").read_text()


def run_example(folder: Path, preset: str) -> str:
    """What the example prints with this preset; run as a script without a __main__ guard."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert 'preset("demo")' in example
    script = folder / "example.py"
    script.write_text(example.replace('preset("demo")', f'preset("{preset}")'))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script.name], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example_runs(tmp_path: Path) -> None:
    printed = run_example(tmp_path, "debug")  # the smallest preset: it takes seconds
    assert re.search(r"actions: \d+, reached: (True|False)", printed)


@pytest.mark.slow
def test_the_python_example_reaches_its_goal(tmp_path: Path) -> None:
    assert "reached: True" in run_example(tmp_path, "demo")


def test_every_command_of_the_readme_is_a_verb_and_every_verb_is_mentioned() -> None:
    mentioned = set(re.findall(r"`lewm ([a-z-]+)", README))
    assert mentioned == set(VERBS)
