"""BatchNorm's statistics are those of the weights that are validated and saved, and training does not notice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lewm.train.batchnorm import measure_batchnorm

from lewm import checkpoint
from lewm.config import Config
from lewm.methods.lewm import LeWM
from lewm.model.projector import Projector
from lewm.presets import preset
from lewm.train import trainer
from lewm.train.inputs import load_windows, open_dataset
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.train.run import OPTIMIZER
from lewm.types import ActionStats, Batch

STATISTICS = {
    f"{projector}.1.{moment}"
    for projector in ("projector", "prediction_projector")
    for moment in ("running_mean", "running_var")
}


def lively_model(dropout: float) -> LeWM:
    """As after some training: gates are open, so that the predictor does something and dropout acts on it."""
    config = preset("debug").method
    torch.manual_seed(0)
    model = LeWM(
        replace(config, predictor=replace(config.predictor, dropout=dropout)), ActionStats((0.5, -0.5), (2.0, 3.0))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def batches() -> list[Batch]:
    """Not all of one size: the mean over batches is not the mean over windows."""
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            pixels=torch.randint(0, 256, (size, 4, 28, 28, 3), dtype=torch.uint8, generator=generator),
            actions=torch.randn(size, 4, 5, 2, generator=generator),
        )
        for size in (20, 50, 30)
    ]


@torch.no_grad()
def seen_by_batchnorm(model: LeWM, batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the BatchNorm of either projector is given (N, hidden) when the model, as it is, embeds and predicts."""
    seen: dict[Projector, list[torch.Tensor]] = {model.projector: [], model.prediction_projector: []}
    hooks = [
        projector[1].register_forward_pre_hook(lambda _, inputs, found=found: found.append(inputs[0].double()))
        for projector, found in seen.items()
    ]
    for batch in batches:
        z_BTD, actions_BTA = model.encode(batch.pixels), model.normalise_actions(batch.actions)
        model.predict(z_BTD[:, :-1], actions_BTA[:, :-1])
    for hook in hooks:
        hook.remove()
    return torch.cat(seen[model.projector]), torch.cat(seen[model.prediction_projector])


def assert_describes(projector: Projector, seen_NC: torch.Tensor) -> None:
    """The projector's statistics are the mean and the unbiased variance of what its BatchNorm has seen."""
    variance, mean = torch.var_mean(seen_NC, dim=0, correction=1)
    torch.testing.assert_close(projector[1].running_mean.double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(projector[1].running_var.double(), variance, rtol=1e-4, atol=0)


# -- the measurement ------------------------------------------------------------------------------------------


def test_statistics_are_those_of_all_batches_together(batches: list[Batch]):
    """The second projector's are of predictions from embeddings that have the first one's new statistics."""
    model = lively_model(dropout=0.0)
    _, stale_NC = seen_by_batchnorm(model, batches)
    measure_batchnorm(model, batches)
    embedded_NC, predicted_NC = seen_by_batchnorm(model, batches)
    assert (len(embedded_NC), len(predicted_NC)) == (100 * 4, 100 * 3)
    assert_describes(model.projector, embedded_NC)
    assert_describes(model.prediction_projector, predicted_NC)
    with pytest.raises(AssertionError):
        assert_describes(model.prediction_projector, stale_NC)


def test_dropout_is_on_while_the_second_is_measured(batches: list[Batch]):
    model, certain = lively_model(dropout=0.5), lively_model(dropout=0.0)
    for each in (model, certain):
        measure_batchnorm(each, batches)
    torch.testing.assert_close(model.projector[1].running_var, certain.projector[1].running_var)
    measured_C = model.prediction_projector[1].running_var
    assert (measured_C / certain.prediction_projector[1].running_var).mean() > 1.2
    # As in training, where other units are dropped each time.
    model.predictor.train()
    _, in_training_NC = seen_by_batchnorm(model, batches)
    assert (measured_C / in_training_NC.var(0)).mean() == pytest.approx(1, abs=0.1)


def test_nothing_but_the_statistics_changes_and_the_model_is_ready_to_evaluate(batches: list[Batch]):
    model = lively_model(dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_batchnorm(model, iter(batches))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == STATISTICS
    assert not any(module.training for module in model.modules())


# -- its use in training --------------------------------------------------------------------------------------


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
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / OPTIMIZER)


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

    def spy(model: LeWM, batches: Iterable[Batch]) -> None:
        found.append(list(batches))
        measure_batchnorm(model, found[-1])

    monkeypatch.setattr(trainer, "measure_batchnorm", spy)
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
