"""BatchNorm's statistics are those of the weights that are validated and saved, and training does not notice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lewm import checkpoint
from lewm.config import Config
from lewm.methods.lewm import LeWM
from lewm.train.inputs import load_windows, open_dataset
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.types import Batch

STATISTICS = {
    f"{projector}.1.{moment}"
    for projector in ("projector", "prediction_projector")
    for moment in ("running_mean", "running_var")
}


def hasty(config: Config, out: Path, **changes: float) -> Config:
    """Steps so large that averages over the latest ten describe another network. Half of the episodes are held out:
    with one of them, the luck of the draw would decide what validation finds."""
    settings = {"steps": 40, "lr": 0.1, "final_lr_fraction": 1.0, "batch_size": 32, "val_every": 10, "val_batches": 4}
    settings["checkpoint_every"] = 20
    loader = replace(config.loader, val_fraction=0.5)
    return replace(config, out=out, loader=loader, train=replace(config.train, **{**settings, **changes}))


def saved_tensors(run: Path, step: int = 40) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of a run's checkpoint."""
    folder = run / "checkpoints" / f"step_{step:07d}"
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.fixture(scope="module")
def calibrated(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibrated") / "run"
    train(hasty(debug_config, out, calibration_batches=8))
    return out


@pytest.fixture(scope="module")
def uncalibrated(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uncalibrated") / "run"
    train(hasty(debug_config, out, calibration_batches=0))
    return out


def test_validation_in_the_middle_of_a_run_sees_the_model_as_it_is(calibrated: Path, uncalibrated: Path):
    """Near the loss of the same step. With running averages it was 3.4 times as high at least, for each of ten seeds,
    and 20 times in the middle of them."""

    def middle(run: Path, name: str) -> float:
        values = {row["step"]: row[name] for row in read_metrics(run / "metrics.jsonl") if name in row}
        return values[10] + values[20] + values[30]

    assert middle(calibrated, "loss") == middle(uncalibrated, "loss")
    assert middle(calibrated, "val/loss") < 2 * middle(calibrated, "loss")
    assert middle(calibrated, "val/loss") < 0.3 * middle(uncalibrated, "val/loss")


def test_calibration_changes_statistics_and_nothing_else(calibrated: Path, uncalibrated: Path):
    assert differing(saved_tensors(calibrated), saved_tensors(uncalibrated)) == STATISTICS


def test_a_checkpoint_needs_no_validation_to_be_calibrated(debug_config: Config, calibrated: Path, tmp_path: Path):
    """Nor do its statistics depend on when else they were measured."""
    train(hasty(debug_config, tmp_path / "run", calibration_batches=8, val_every=1000))
    for step in (20, 40):
        assert differing(saved_tensors(tmp_path / "run", step), saved_tensors(calibrated, step)) == set()


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[list[Batch]]:
    """The batches of each measurement that a trainer makes, once it has made them."""
    found: list[list[Batch]] = []

    honest = LeWM.calibrate

    def spy(model: LeWM, batches: Iterable[Batch]) -> None:
        found.append(list(batches))
        honest(model, found[-1])

    monkeypatch.setattr(LeWM, "calibrate", spy)
    return found


def test_calibration_sees_the_same_training_windows_each_time(
    debug_config: Config, tmp_path: Path, measurements: list[list[Batch]]
):
    config = hasty(debug_config, tmp_path / "run", steps=10, val_every=5, calibration_batches=3)
    train(config)
    # After 5 steps, and after the last, whose checkpoint needs no other than its validation.
    assert [len(batches) for batches in measurements] == [3, 3]
    first, last = (torch.cat([batch.actions for batch in batches]) for batches in measurements)
    assert torch.equal(first, last)
    training = load_windows(config, open_dataset(config), torch.device("cpu")).training
    known = {actions.numpy().tobytes() for actions in training.batch(np.arange(len(training))).actions}
    drawn = [actions.numpy().tobytes() for actions in first]
    assert len(drawn) == 3 * 32
    assert set(drawn) <= known
