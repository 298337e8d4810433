"""A user's own environment, as the documentation writes it, goes through the whole pipeline by its name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "guide" / "add-an-environment.md"
SECTION = "## A whole one"


def documented_example() -> str:
    section = DOCUMENTATION.read_text(encoding="utf-8").split(SECTION, 1)[1]
    return section.split("```python\n", 1)[1].split("```", 1)[0]


def python(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder; as the installed `lewm` command, it does not search that for modules by itself."""
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | environ, capture_output=True, text=True)


def lewm(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "lewm", *arguments, **environ)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the documented module in it."""
    (tmp_path / "my_world.py").write_text(documented_example())
    return tmp_path


def test_the_example_is_short() -> None:
    assert len([line for line in documented_example().splitlines() if line.strip()]) <= 30


# All commands in one process, as importing torch for each would take most of the time.
PIPELINE = """
from pathlib import Path
from lewm import cli
from lewm.evaluate.manifest import build_manifest

assert cli.run("collect puck --episodes 20 --resolution 28 --workers 2 --out puck.h5".split()) == 0
assert cli.run("train debug --env puck --data puck.h5 --out run --train.steps 3 --device cpu".split()) == 0
build_manifest("puck", 2, 10, Path("pairs.json"))
assert cli.run("eval run --manifest pairs.json --eval.episodes 2 --eval.workers 2 --device cpu".split()) == 0
"""


def test_the_example_from_collecting_to_evaluating(folder: Path) -> None:
    done = python(folder, "-c", PIPELINE, LEWM_ENVS="my_world")
    assert done.returncode == 0, done.stderr
    assert "20 episodes (20 new)" in done.stdout
    assert "3 steps; checkpoint" in done.stdout
    with h5py.File(folder / "puck.h5") as file:
        assert file.attrs["environment"] == "mine/Puck-v0"
        assert len(file["ep_len"]) == 20
    results = json.loads(next(folder.glob("run/evaluations/step_0000003/*.json")).read_text())
    assert results["environment"] == "mine/Puck-v0"
    assert len(results["episodes"]) == 2


def test_it_is_listed_and_forgotten_without_the_variable(folder: Path) -> None:
    assert "mine/Puck-v0" in lewm(folder, "envs", LEWM_ENVS="my_world").stdout
    done = python(folder, "-c", "import lewm; lewm.make_env('puck')")
    assert "EnvError: Unknown environment 'puck'" in done.stderr
    assert "LEWM_ENVS" in done.stderr, "the remedy"


@pytest.mark.parametrize("module", ["no_world", "no_package.world"])
def test_a_module_that_is_not_there_is_named(folder: Path, module: str) -> None:
    done = lewm(folder, "envs", LEWM_ENVS=f"my_world,{module}")
    assert done.returncode == 1
    assert re.search(rf"Error: LEWM_ENVS names the module '{module}', which Python cannot find", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_mistake_in_the_module_is_shown_as_it_is(folder: Path) -> None:
    (folder / "broken.py").write_text("import no_such_package\n")
    done = lewm(folder, "envs", LEWM_ENVS="broken")
    assert "ModuleNotFoundError: No module named 'no_such_package'" in done.stderr


def test_a_script_collects_with_processes_that_import_its_module(folder: Path) -> None:
    """The workers are told of the entry, and then import the module that registers it once more."""
    script = (
        "import my_world, lewm; settings = lewm.CollectConfig(episodes=20, resolution=8, workers=2); "
        "print(lewm.collect('puck', 'out.h5', settings).episodes)"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == "20", done.stderr


def test_the_expert_solves_its_task(folder: Path) -> None:
    """An example whose data never shows success would teach the reader nothing."""
    code = "from lewm.data.generate import generate_episode; "
    code += "print(sum(len(generate_episode('puck', 8, 0, i)['state']) < 101 for i in range(20)))"
    done = python(folder, "-c", code, LEWM_ENVS="my_world")
    assert int(done.stdout) >= 15, done.stderr
