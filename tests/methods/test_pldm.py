"""PLDM's seven terms against a literal transcription of their formulas, number by number."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lewm.config import PredictorConfig
from lewm.errors import ConfigError
from lewm.methods.pldm import PLDM, PLDMConfig, Weights
from lewm.presets import PRESETS, preset
from lewm.train.compiled import compile_parts
from lewm.types import ALONE, ActionStats, Batch, DataFacts, Losses

EVERY_TERM = Weights(time_covariance=0.3, inverse_dynamics=0.9)
B, T, D = 6, 4, 8


def model_with(weights: Weights, **settings_of_the_model: Any) -> PLDM:
    """In evaluation mode: without dropout, so that two computations can be compared."""
    torch.manual_seed(0)
    settings = preset("debug", "pldm").method
    assert isinstance(settings, PLDMConfig)
    settings = replace(settings, weights=weights, **settings_of_the_model)
    model = PLDM(settings, DataFacts(ActionStats((0.1, -0.2), (0.5, 2.0)))).eval()
    with torch.no_grad():  # the predictor's gates start closed
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (B, T, 28, 28, 3), dtype=torch.uint8, generator=generator)
    return Batch(torch.randn(B, T, 5, 2, generator=generator), pixels)


def losses(model: PLDM, batch: Batch) -> Losses:
    return model.losses(batch, {}, ALONE)


def unbiased(values: np.ndarray) -> float:
    """Var as the appendix writes it."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def covariance(rows: np.ndarray) -> np.ndarray:
    """Cov as the appendix writes it, of (N, D)."""
    centred = rows - rows.mean(0)
    return centred.T @ centred / (len(rows) - 1)


def off_diagonal(matrix: np.ndarray) -> float:
    d = len(matrix)
    return sum(matrix[i, j] ** 2 for i in range(d) for j in range(d) if i != j) / (d * d - d)


def hinge(variance: float) -> float:
    return max(0.0, 1 - math.sqrt(variance + 1e-4))


@torch.no_grad()
def transcribed(model: PLDM, batch: Batch) -> dict[str, float]:
    """Every term, with loops over windows, times and dimensions."""
    assert batch.pixels is not None
    z_BTD = model.encode(batch.pixels)
    z_scored = (batch.actions - torch.tensor([0.1, -0.2])) / torch.tensor([0.5, 2.0])
    blocks_BTA = z_scored.reshape(B, T, 10)
    predicted = model.predict(z_BTD[:, :-1], blocks_BTA[:, :-1]).double().numpy()
    read = model.inverse_dynamics(torch.cat([z_BTD[:, 1:], z_BTD[:, :-1]], -1)).double().numpy()
    z, blocks = z_BTD.double().numpy(), blocks_BTA.double().numpy()
    steps = [(i, t) for i in range(B) for t in range(T - 1)]
    return {
        "prediction": np.mean([((predicted[i, t] - z[i, t + 1]) ** 2).mean() for i, t in steps]),
        "variance": np.mean([hinge(unbiased(z[:, t, d])) for t in range(T) for d in range(D)]),
        "covariance": np.mean([off_diagonal(covariance(z[:, t])) for t in range(T)]),
        "similarity": np.mean([((z[i, t] - z[i, t + 1]) ** 2).mean() for i, t in steps]),
        "time_variance": np.mean([hinge(unbiased(z[i, :, d])) for i in range(B) for d in range(D)]),
        "time_covariance": np.mean([off_diagonal(covariance(z[i])) for i in range(B)]),
        "inverse_dynamics": np.mean([((read[i, t] - blocks[i, t]) ** 2).mean() for i, t in steps]),
    }


def test_every_term_is_its_formula(batch: Batch):
    model = model_with(EVERY_TERM)
    found, expected = losses(model, batch), transcribed(model, batch)
    assert found.terms.keys() == expected.keys()
    for name, value in expected.items():
        assert found.terms[name].item() == pytest.approx(value, rel=1e-4), name
        assert value > 1e-3, f"{name} would be right if it were 0"
    weighted = (18 * expected["variance"], 12 * expected["covariance"], 0.2 * expected["similarity"])
    weighted += (0.7 * expected["time_variance"], 0.3 * expected["time_covariance"], 0.9 * expected["inverse_dynamics"])
    assert found.total.item() == pytest.approx(expected["prediction"] + sum(weighted), rel=1e-4)


@torch.no_grad()
def test_the_original_reads_other_frames_and_rolls_its_prediction_out(batch: Batch):
    model = model_with(Weights(time_covariance=0.3), variant="original")
    found, expected = losses(model, batch), transcribed(model, batch)
    assert batch.pixels is not None
    z_BTD = model.encode(batch.pixels)
    blocks_BTA = ((batch.actions - torch.tensor([0.1, -0.2])) / torch.tensor([0.5, 2.0])).reshape(B, T, 10)
    imagined = z_BTD[:, :1]
    for t in range(T - 1):
        imagined = torch.cat([imagined, model.predict(imagined, blocks_BTA[:, : t + 1])[:, -1:]], dim=1)
    z, rolled = z_BTD.double().numpy(), imagined.double().numpy()
    later = [(i, t) for i in range(B) for t in range(1, T - 1)]
    expected["prediction"] = np.mean([((rolled[i, t] - z[i, t]) ** 2).mean() for i in range(B) for t in range(1, T)])
    expected["variance"] = np.mean([hinge(unbiased(z[:, 0, d])) for d in range(D)])
    expected["covariance"] = off_diagonal(covariance(z[:, 0]))
    expected["similarity"] = np.mean([((z[i, t] - z[i, t + 1]) ** 2).mean() for i, t in later])
    expected["time_variance"] = np.mean([hinge(unbiased(z[i, 1:, d])) for i in range(B) for d in range(D)])
    expected["time_covariance"] = np.mean([off_diagonal(covariance(z[i, 1:])) for i in range(B)])
    assert found.terms.keys() == expected.keys()
    for name, value in expected.items():
        assert found.terms[name].item() == pytest.approx(value, rel=1e-4), name
    weights = {"variance": 3.9843, "covariance": 6.9238, "similarity": 0.74242, "time_variance": 0.24535}
    weights |= {"time_covariance": 0.3, "inverse_dynamics": 1.072, "prediction": 1}
    assert found.total.item() == pytest.approx(sum(weights[name] * expected[name] for name in weights), rel=1e-4)


def test_a_weight_that_is_typed_wins_over_the_variants():
    typed = Weights(similarity=5.0, inverse_dynamics=0.0)
    for variant, variance in (("authors", 18.0), ("original", 3.9843)):
        weighed = PLDMConfig(variant=variant, weights=typed).weighed  # type: ignore[arg-type]
        assert (weighed["similarity"], weighed["inverse_dynamics"], weighed["variance"]) == (5.0, 0.0, variance)
    assert not hasattr(model_with(typed, variant="original"), "inverse_dynamics")
    assert hasattr(model_with(Weights(), variant="original"), "inverse_dynamics")
    with pytest.raises(ConfigError, match=r"method\.weights\.variance must be at least 0, got -1\.0"):
        Weights(variance=-1.0)
    with pytest.raises(ConfigError, match=r"method\.history must be at least 3 in the variant original"):
        PLDMConfig(variant="original", history=2)


def test_the_original_compiles_and_is_calibrated_as_it_predicts(batch: Batch):
    """That is, by other statistics than those of predictions that rest on frames."""
    torch._dynamo.reset()
    model = model_with(Weights(), variant="original", predictor=PredictorConfig(1, 2, 8, 32, dropout=0.0))
    expected = losses(copy.deepcopy(model).train(), batch).total
    torch.testing.assert_close(losses(compile_parts(copy.deepcopy(model).train(), "aot_eager"), batch).total, expected)
    authors = model_with(Weights(), predictor=PredictorConfig(1, 2, 8, 32, dropout=0.0))
    for each in (model, authors):
        each.calibrate(iter([batch, batch]))
        assert not each.training
    means = [each.prediction_projector.norm.running_mean for each in (model, authors)]
    assert not torch.allclose(*means, atol=1e-3)


def test_the_papers_weights_leave_two_terms_out(batch: Batch):
    found = losses(model_with(Weights()), batch)
    assert list(found.terms) == ["prediction", "variance", "covariance", "similarity", "time_variance"]
    assert not hasattr(model_with(Weights()), "inverse_dynamics")


def test_the_released_similarity_compares_what_is_centred(batch: Batch):
    plain, centred = model_with(Weights()), model_with(Weights(), centred_similarity=True)
    assert batch.pixels is not None
    z = plain.encode(batch.pixels).detach()
    expected = (z - z.mean(0)).diff(dim=1).square().mean()
    torch.testing.assert_close(losses(centred, batch).terms["similarity"], expected)
    assert losses(plain, batch).terms["similarity"] > 1.01 * expected


def test_nothing_is_detached(batch: Batch):
    """The last frame is only ever a target of the prediction, and it is pulled."""
    found = losses(model_with(Weights()), batch)
    assert found.embeddings is not None
    (gradient_BTD,) = torch.autograd.grad(found.terms["prediction"], found.embeddings)
    assert gradient_BTD[:, -1].abs().max() > 0


def test_a_collapsed_batch_costs_most_and_is_torn_apart():
    """Variance pushes equal embeddings apart; without it they would stay where they are."""
    model = model_with(Weights())
    frame = torch.randint(0, 256, (28, 28, 3), dtype=torch.uint8)
    pixels = frame.expand(B, T, -1, -1, -1)
    found = losses(model, Batch(torch.zeros(B, T, 5, 2), pixels))
    assert found.terms["variance"].item() == pytest.approx(1 - math.sqrt(1e-4), abs=1e-3)
    assert found.terms["similarity"].item() == pytest.approx(0, abs=1e-6)


def test_the_inverse_dynamics_is_clipped_apart():
    groups = model_with(EVERY_TERM).groups()
    apart = [group for group in groups if group.clip]
    assert [sum(p.numel() for p in group.parameters) for group in apart] == [2 * D * 512 + 512 + 512 * 10 + 10]


@pytest.mark.parametrize("world", PRESETS)
def test_it_trains_as_many_steps_as_lewm(world: str):
    """Else neither could be said to be the better one."""
    assert preset(world, "pldm").train.steps == preset(world, "lewm").train.steps
