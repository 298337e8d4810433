"""What a run keeps to look back at: measurements at each validation, and small models along the way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import lewm
from lewm import checkpoint
from lewm.config import Config
from lewm.errors import ConfigError
from lewm.presets import preset
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.train.run import Run
from lewm.train.trainer import SilentMonitor

STEPS = 10  # Checkpoints are written after 4, 8 and the last.
KEPT = [3, 6, 9, 10]
DIAGNOSTICS = {"embedding_std", "effective_rank", "straightness"}


def keeping(config: Config, out: Path, **changes: Any) -> Config:
    return replace(config, out=out, train=replace(config.train, **{"steps": STEPS, "keep_every": 3, **changes}))


class Notes(SilentMonitor):
    """Keeps what it is told; crashes after a step, if one is given."""

    def __init__(self, crash: int | None = None) -> None:
        self.notes: list[str] = []
        self._crash = crash

    def note(self, message: str) -> None:
        self.notes.append(message)

    def step(self, step: int, total: int, values: dict[str, float]) -> None:  # noqa: ARG002
        if step == self._crash:
            self._give_up()

    def _give_up(self) -> NoReturn:
        raise ZeroDivisionError


@pytest.fixture(scope="module")
def kept(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that keeps a series, and what it said."""
    out, monitor = tmp_path_factory.mktemp("series") / "run", Notes()
    train(keeping(debug_config, out), monitor=monitor)
    return out, monitor.notes


def models(run: Path) -> list[Path]:
    return checkpoint.of_run(Run(run).series)


def test_a_series_has_a_small_model_every_so_often(kept: tuple[Path, list[str]]):
    run, _ = kept
    assert [checkpoint.step_of(folder) for folder in models(run)] == KEPT
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None
    for folder in models(run):
        assert {path.name for path in folder.iterdir()} == {checkpoint.CONFIG, checkpoint.WEIGHTS}
        assert checkpoint.weights_precision(folder) == "bf16"
        assert (folder / checkpoint.WEIGHTS).stat().st_size < 0.65 * (newest / checkpoint.WEIGHTS).stat().st_size


def test_its_models_load_and_are_those_of_their_steps(kept: tuple[Path, list[str]]):
    run, _ = kept
    first, *_, last = (lewm.load(folder, "cpu").own_state() for folder in models(run))
    final = lewm.load(run, "cpu").own_state()
    torch.testing.assert_close(last, final, rtol=2**-7, atol=1e-6)
    assert not all(torch.allclose(first[name].float(), final[name].float(), rtol=2**-7) for name in final)


def test_the_disk_use_is_said_once(kept: tuple[Path, list[str]]):
    run, notes = kept
    (said,) = (note for note in notes if note.startswith("Series"))
    assert "4 models" in said
    assert str(run / "series") in said


def test_keeping_changes_no_weights(kept: tuple[Path, list[str]], debug_config: Config, tmp_path: Path):
    plain = keeping(debug_config, tmp_path / "plain", keep_every=0)
    train(plain)
    assert not (tmp_path / "plain" / "series").exists()
    one, other = (lewm.load(run, "cpu").own_state() for run in (kept[0], tmp_path / "plain"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_crashed_ends_with_the_same_series(
    kept: tuple[Path, list[str]], debug_config: Config, tmp_path: Path
):
    config = keeping(debug_config, tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train(config, monitor=Notes(crash=7))
    assert [checkpoint.step_of(folder) for folder in models(tmp_path / "run")] == [3, 6]
    half = tmp_path / "run" / "series" / f".step_0000009.{2**22 + 1}.tmp"  # as of a process that is no more
    half.mkdir()
    train(config)
    assert not half.exists()
    for one, other in zip(models(kept[0]), models(tmp_path / "run"), strict=True):
        assert (one / checkpoint.WEIGHTS).read_bytes() == (other / checkpoint.WEIGHTS).read_bytes()


def test_less_than_none_cannot_be_kept(debug_config: Config):
    with pytest.raises(ConfigError, match=r"train\.keep_every"):
        replace(debug_config.train, keep_every=-1)


@pytest.mark.parametrize("method", ["lewm", "pldm", "dino_wm"])
def test_every_method_that_encodes_measures_its_embeddings(method: str, debug_config: Config, tmp_path: Path):
    config = preset("debug", method)
    run = replace(config, data=debug_config.data, device="cpu", out=tmp_path / method)
    train(replace(run, train=replace(run.train, steps=4)))
    rows = read_metrics(tmp_path / method / "metrics.jsonl")
    validated = [row for row in rows if "val/loss" in row]
    assert validated
    for row in validated:
        assert {name.removeprefix("val/") for name in row} >= DIAGNOSTICS
    assert set().union(*rows) >= DIAGNOSTICS
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_without_enough_frames_straightness_is_left_out(debug_config: Config, tmp_path: Path):
    short = replace(debug_config, method=replace(debug_config.method, history=1), out=tmp_path)
    train(replace(short, train=replace(short.train, steps=4)))
    measured = set().union(*read_metrics(tmp_path / "metrics.jsonl"))
    assert {"val/effective_rank", "effective_rank"} <= measured
    assert not {"val/straightness", "straightness"} & measured
