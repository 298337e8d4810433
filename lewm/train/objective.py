"""The training objective (paper, Algorithm 1): two terms, no stop-gradient, no moving averages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lewm.model.sigreg import SIGReg
from lewm.model.world_model import LeWM
from lewm.types import Batch


@dataclass(frozen=True)
class Losses:
    """The loss terms of one batch, and the embeddings (B, T, D) they were computed from."""

    total: torch.Tensor
    prediction: torch.Tensor
    sigreg: torch.Tensor
    z_BTD: torch.Tensor

    def detach(self) -> Losses:
        """The same numbers without the graph that computed them."""
        return Losses(self.total.detach(), self.prediction.detach(), self.sigreg.detach(), self.z_BTD.detach())


def lewm_loss(model: LeWM, sigreg: SIGReg, batch: Batch, directions_DM: torch.Tensor) -> Losses:
    """L = L_pred + lambda * SIGReg(Z) for windows of history + 1 frames, along the directions of the step.

    The predictor sees the first ``history`` frames and predicts the one after each of them, so the window's last
    action block is not used.
    """
    assert batch.pixels is not None
    z_BTD = model.encode(batch.pixels)
    actions_BTA = model.normalise_actions(batch.actions)
    predicted_BTD = model.predict(z_BTD[:, :-1], actions_BTA[:, :-1])

    prediction = F.mse_loss(predicted_BTD.float(), z_BTD[:, 1:].float())
    regularisation = sigreg(z_BTD.transpose(0, 1), directions_DM)
    total = prediction + sigreg.config.weight * regularisation
    return Losses(total, prediction, regularisation, z_BTD)
