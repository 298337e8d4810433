"""`lewm info` and `lewm import-official`: what there is, and what is not what it should be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from lewm.config import Config
from lewm.version import __version__

Lewm = Callable[..., Any]  # the fixture: arguments -> what came of it


def test_info_on_a_dataset(lewm: Lewm, debug_config: Config):
    answer = lewm("info", debug_config.data)
    assert answer.status == 0
    for part in ("environment lewm/TwoRoom-v0", "episodes 8,", "of 28 px", "actions 2 numbers", "seed 0"):
        assert part in answer.out


def test_info_says_what_the_agent_senses_of_itself(lewm: Lewm, debug_config: Config, tmp_path: Path):
    assert debug_config.data is not None
    older = Path(shutil.copy(debug_config.data, tmp_path))
    with h5py.File(older, "r+") as file:
        del file.attrs["proprio"], file.attrs["checksums"]
    assert "proprio 2 numbers: agent_x, agent_y" in lewm("info", debug_config.data).out
    assert "proprio 2 of its 2 numbers: an older file" in lewm("info", older).out


def test_info_on_a_run_and_on_its_checkpoint(lewm: Lewm, debug_run: Path):
    of_run = lewm("info", debug_run)
    assert of_run.status == 0
    for part in ("ViT/14 at 28 px", f"written by lewm {__version__}", "history 3", "8 steps", "lewm/TwoRoom-v0"):
        assert part in of_run.out
    assert lewm("info", debug_run / "checkpoints" / "step_0000008") == of_run


def test_info_on_garbage(lewm: Lewm, debug_config: Config, debug_run: Path, tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("not a dataset")
    lewm("info", text).assert_refused("notes.txt")
    cut = tmp_path / "cut.h5"
    assert debug_config.data is not None
    cut.write_bytes(debug_config.data.read_bytes()[:20_000])
    lewm("info", cut).assert_refused("cut.h5")
    lewm("info", tmp_path / "missing").assert_refused("no such folder")
    lewm("info", tmp_path / "missing.h5").assert_refused("missing.h5")
    lewm("info", tmp_path).assert_refused("model.safetensors")
    damaged = shutil.copytree(debug_run / "checkpoints" / "step_0000008", tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    lewm("info", damaged).assert_refused("model.safetensors")


def test_import_official_refuses_what_is_not_official(lewm: Lewm, tmp_path: Path):
    weights, config, out = tmp_path / "weights.pt", tmp_path / "config.json", tmp_path / "imported"
    lewm("import-official", weights, config, out).assert_refused("config.json")
    config.write_text("{}")
    lewm("import-official", weights, config, out).assert_refused()
    weights.write_bytes(b"not a state dict")
    lewm("import-official", weights, config, out).assert_refused()
    lewm("import-official", weights, config, out, "--dataset", tmp_path / "none.h5").assert_refused("none.h5")
    assert not out.exists()
