"""No verb writes over what it reads, over a file of another kind, or into a model's folder; links are followed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lewm import checkpoint
from lewm.config import Config
from lewm.files import only_writer

Lewm = Callable[..., Any]

# What each verb is asked to write; OUT is where, {data}, {model} and {pairs} are what it reads.
COMMANDS = {
    "collect": ("collect tworoom --episodes 2 --resolution 32 --workers 1 --out OUT", ".h5"),
    "train": ("train debug --data {data} --device cpu --out OUT", ""),
    "eval": ("eval {model} --device cpu --eval.episodes 2 --manifest {pairs} --out OUT", ".json"),
    "eval, films": ("eval {model} --device cpu --eval.episodes 2 --manifest {pairs} --videos 1 --out OUT", ".json"),
    "export": ("export {model} OUT", ""),
    "import-official": ("import-official {model}/model.safetensors {model}/config.json OUT", ""),
    "demo": ("demo --out OUT", ""),
    "data check": ("data check {data} --contact-sheet OUT", ".png"),
    "data show": ("data show {data} --out OUT", ".gif"),
    "data convert, HDF5": ("data convert {data} OUT --to hdf5", ".h5"),
    "data convert, folder": ("data convert {data} OUT --to folder", ""),
    "data convert, LeRobot": ("data convert {data} OUT --to lerobot", ""),
}
# Places where nothing may be written, with links of both kinds; SUFFIX is what a name has to end with.
PLACES = {
    "the dataset": "in.h5",
    "a link to it": "link to dataSUFFIX",
    "another name of it": "hard link to dataSUFFIX",
    "the pairs": "pairs.json",
    "a link to them": "link to pairsSUFFIX",
    "the model": "model",
    "a link to the model": "link to model",
    "its weights": "model/model.safetensors",
    "its description": "model/config.json",
    "inside of it": "model/newSUFFIX",
    "deep inside of it": "model/one/two/newSUFFIX",
    "inside, through a link": "link to model/newSUFFIX",
    "inside, the other way round": "notes/../model/newSUFFIX",
    "somebody's notes": "notes/mine.json",
    "a loop": "loop/newSUFFIX",
    "inside a file": "in.h5/newSUFFIX",
}


def state(folder: Path) -> dict[str, object]:
    """What is in a folder: contents by name, and where links lead."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@pytest.fixture
def folder(debug_config: Config, debug_run: Path, tmp_path: Path) -> Path:
    """A dataset, a model and pairs, and links to them."""
    assert debug_config.data is not None
    folder = tmp_path / "work"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "mine.json").write_text('{"all": "my work"}')
    shutil.copy(debug_config.data, folder / "in.h5")
    shutil.copytree(checkpoint.resolve(debug_run), folder / "model")
    pairs = [{"start": [60, 60], "goal": [60, 120]}] * 2
    manifest = {"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": pairs}
    (folder / "pairs.json").write_text(json.dumps(manifest))
    (folder / "link to model").symlink_to(folder / "model")
    (folder / "loop").symlink_to("loop")
    for suffix in {suffix for _, suffix in COMMANDS.values()}:
        (folder / f"link to data{suffix}").symlink_to(folder / "in.h5")
        (folder / f"hard link to data{suffix}").hardlink_to(folder / "in.h5")
        (folder / f"link to pairs{suffix}").symlink_to(folder / "pairs.json")
    return folder


@pytest.mark.parametrize("verb", COMMANDS)
def test_nothing_that_is_there_loses_its_place(lewm: Lewm, folder: Path, verb: str):
    command, suffix = COMMANDS[verb]
    inputs = {"data": folder / "in.h5", "model": folder / "model", "pairs": folder / "pairs.json"}
    for what, place in PLACES.items():
        before = state(folder)
        out = str(folder / place.replace("SUFFIX", suffix))
        answer = lewm(*(out if part == "OUT" else part.format(**inputs) for part in command.split()))
        assert state(folder) == before, what
        assert "Traceback" not in answer.err, what
        if (verb, what) != ("data check", "inside a file"):  # it reads all the same, and says that nothing was drawn
            assert (what, answer.status) == (what, 1)
            assert answer.err.startswith("Error: "), what


def test_films_are_not_put_into_a_model(lewm: Lewm, folder: Path):
    """Their folder is beside the results, and may be a link."""
    (folder / "results_videos").symlink_to(folder / "model")
    before = state(folder)
    options = ("--device", "cpu", "--eval.episodes", 2, "--out", folder / "results.json")
    lewm("eval", folder / "model", *options, "--videos", 1).assert_refused("lies inside")
    assert state(folder) == before


def test_an_export_takes_no_place_but_an_earlier_exports(lewm: Lewm, folder: Path, debug_run: Path):
    run = Path(shutil.copytree(debug_run, folder / "run"))
    newest = checkpoint.resolve(run)
    before = state(folder)
    for source, out in ((folder / "model", run), (folder / "model", newest), (run, folder / "model"), (run, newest)):
        assert lewm("export", source, out).status == 1
        assert state(folder) == before
    assert lewm("export", run, folder / "toy").status == 0
    first = state(folder / "toy")
    assert lewm("export", run, folder / "toy").status == 0
    assert state(folder / "toy") == first


def test_one_exports_at_a_time(lewm: Lewm, folder: Path):
    with only_writer(folder / "toy" / ".lock", ""):
        lewm("export", folder / "model", folder / "toy").assert_refused("Another process is exporting to")
    assert not (folder / "toy").exists() or not any((folder / "toy").iterdir())
