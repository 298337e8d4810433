"""LeWM's training objective against Algorithm 1, written out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.types import ALONE, ActionStats, Batch, DataFacts, Losses

SEED, STEP = 3, 7
SETTINGS = preset("debug").method


@pytest.fixture
def model() -> LeWM:
    """In evaluation mode: without dropout, so that two computations can be compared."""
    torch.manual_seed(0)
    model = LeWM(SETTINGS, DataFacts(ActionStats((0.1, -0.2), (0.5, 2.0)))).eval()
    # The predictor's gates start closed, so that actions have no effect; open them a little, as training would.
    with torch.no_grad():
        for parameter in model.predictor.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (6, 4, 28, 28, 3), dtype=torch.uint8, generator=generator)
    return Batch(torch.randn(6, 4, 5, 2, generator=generator), pixels)


def loss(model: LeWM, batch: Batch) -> Losses:
    return model.losses(batch, model.draws(SEED, STEP, model.device), ALONE)


def epps_pulley(z_BTD: torch.Tensor, directions_DM: torch.Tensor) -> torch.Tensor:
    """N times the weighted distance of characteristic functions over both signs of t, with complex numbers."""
    t_Q = torch.linspace(0, 3, 17)
    gaussian_Q = torch.exp(-(t_Q**2) / 2)
    h_BTM = z_BTD @ directions_DM
    empirical_TMQ = torch.exp(1j * h_BTM.unsqueeze(-1) * t_Q).mean(0)
    integrand_TMQ = (empirical_TMQ - gaussian_Q).abs() ** 2 * gaussian_Q
    return len(z_BTD) * 2 * torch.trapezoid(integrand_TMQ, t_Q).mean()


def test_loss_is_algorithm_1(model: LeWM, batch: Batch):
    losses = loss(model, batch)
    emb = model.encode(batch.pixels)
    z_scored = (batch.actions - torch.tensor([0.1, -0.2])) / torch.tensor([0.5, 2.0])
    next_emb = model.predict(emb[:, :-1], z_scored[:, :-1].reshape(6, 3, 10))
    pred_loss = F.mse_loss(emb[:, 1:], next_emb)
    sigreg_loss = epps_pulley(emb, model.draws(SEED, STEP, emb.device)["directions"])
    torch.testing.assert_close(losses.terms["prediction"], pred_loss)
    torch.testing.assert_close(losses.terms["sigreg"], sigreg_loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses.total, pred_loss + 0.09 * sigreg_loss)
    torch.testing.assert_close(losses.embeddings, emb)


def test_the_last_action_block_does_not_matter(model: LeWM, batch: Batch):
    def total_with(block: int) -> float:
        actions = batch.actions.clone()
        actions[:, block] += 1
        return loss(model, Batch(actions, batch.pixels)).total.item()

    reference = loss(model, batch).total.item()
    assert total_with(3) == reference
    assert all(total_with(block) != reference for block in (0, 1, 2))


def test_no_stop_gradient(model: LeWM, batch: Batch):
    """The first frame is only ever an input and the last only ever a target: both are pulled."""
    losses = loss(model, batch)
    (gradient_BTD,) = torch.autograd.grad(losses.terms["prediction"], losses.embeddings, retain_graph=True)
    assert gradient_BTD[:, 0].abs().max() > 0
    predicted_BTD = model.predict(losses.embeddings[:, :-1], model.normalise_actions(batch.actions)[:, :-1])
    as_target_BD = 2 * (losses.embeddings[:, -1] - predicted_BTD[:, -1]) / predicted_BTD.numel()
    torch.testing.assert_close(gradient_BTD[:, -1], as_target_BD)


@pytest.mark.parametrize("term", ["prediction", "sigreg"])
def test_both_terms_train_the_encoder(model: LeWM, batch: Batch, term: str):
    value = loss(model, batch).terms[term]
    gradients = torch.autograd.grad(value, list(model.encoder.parameters()), allow_unused=True)
    assert sum(float(g.norm()) for g in gradients if g is not None) > 1e-4


def test_only_the_prediction_trains_the_predictor(model: LeWM, batch: Batch):
    losses = loss(model, batch)
    parameters = list(model.predictor.parameters())
    from_sigreg = torch.autograd.grad(losses.terms["sigreg"], parameters, allow_unused=True, retain_graph=True)
    from_prediction = torch.autograd.grad(losses.terms["prediction"], parameters)
    assert all(g is None for g in from_sigreg)
    assert all(g.norm() > 0 for g in from_prediction)
