"""Calibration: the BatchNorms of both projectors get the statistics of the weights as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from lewm.methods.lewm import LeWM
from lewm.model.projector import Projector
from lewm.presets import preset
from lewm.types import ActionStats, Batch, DataFacts

STATISTICS = {
    f"{projector}.1.{moment}"
    for projector in ("projector", "prediction_projector")
    for moment in ("running_mean", "running_var")
}


def lively_model(dropout: float) -> LeWM:
    """As after some training: gates are open, so that the predictor does something and dropout acts on it."""
    config = preset("debug").method
    torch.manual_seed(0)
    facts = DataFacts(ActionStats((0.5, -0.5), (2.0, 3.0)))
    model = LeWM(replace(config, predictor=replace(config.predictor, dropout=dropout)), facts)
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


def test_statistics_are_those_of_all_batches_together(batches: list[Batch]):
    """The second projector's are of predictions from embeddings that have the first one's new statistics."""
    model = lively_model(dropout=0.0)
    _, stale_NC = seen_by_batchnorm(model, batches)
    model.calibrate(batches)
    embedded_NC, predicted_NC = seen_by_batchnorm(model, batches)
    assert (len(embedded_NC), len(predicted_NC)) == (100 * 4, 100 * 3)
    assert_describes(model.projector, embedded_NC)
    assert_describes(model.prediction_projector, predicted_NC)
    with pytest.raises(AssertionError):
        assert_describes(model.prediction_projector, stale_NC)


def test_dropout_is_on_while_the_second_is_measured(batches: list[Batch]):
    model, certain = lively_model(dropout=0.5), lively_model(dropout=0.0)
    for each in (model, certain):
        each.calibrate(batches)
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
    model.calibrate(iter(batches))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == STATISTICS
    assert not any(module.training for module in model.modules())
