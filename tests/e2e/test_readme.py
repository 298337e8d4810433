"""The README's example runs as it stands, and its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

from lewm.cli import VERBS

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert 'preset("demo")' in example
    # The same program on the smallest preset, so that it takes seconds; run as a script without a __main__ guard.
    script = tmp_path / "example.py"
    script.write_text(example.replace('preset("demo")', 'preset("debug")'))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "imagined distances" in done.stdout


def test_every_command_of_the_readme_is_a_verb_and_every_verb_is_mentioned() -> None:
    mentioned = set(re.findall(r"`lewm ([a-z-]+)", README))
    assert mentioned == set(VERBS)
