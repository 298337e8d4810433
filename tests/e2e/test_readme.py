"""The README's example runs as it stands, and its commands exist."""

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lewm.cli import VERBS
from lewm.cli.demo import run_demo
from lewm.cli.frame import print_rates
from lewm.presets import preset

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


def lines_without_numbers(text: str) -> set[str]:
    """Lines, with # for each number, and without folders and rows of spaces."""
    lines = (re.sub(r"\S*/(?=dataset\.h5)", "", line) for line in text.splitlines())
    return {" ".join(re.sub(r"\d[\d,.]*", "#", line).split()) for line in lines if line.strip()}


def test_a_demo_ends_as_the_readme_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"The end of `make demo`.*?```\n(.*?)```", README, re.DOTALL)
    console = Console(file=io.StringIO(), width=200)
    print_rates(run_demo(replace(preset("debug"), device="cpu"), tmp_path / "demo", False, console))
    assert isinstance(console.file, io.StringIO)
    said = lines_without_numbers(console.file.getvalue() + capsys.readouterr().out)
    report = "Report: runs/demo/report.html"
    assert lines_without_numbers(shown) - {report} <= said
    assert len(lines_without_numbers(shown)) > 8
