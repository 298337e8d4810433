"""Actions that were recorded with the training data, as plans for a search to try."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lewm.errors import PlanningError
from lewm.types import WorldModel

SHRINKAGE = 0.01  # of recorded correlations towards none


@dataclass(frozen=True)
class RecordedPlans:
    """Recorded plans, z-scored (N, H, A), and the matrix (H*A, H*A) that gives noise their course."""

    plans_NHA: torch.Tensor
    colouring: torch.Tensor

    @staticmethod
    def of(plans_NHA: torch.Tensor) -> RecordedPlans:
        """These plans. The matrix gives white noise their correlations, each number with unit variance."""
        flat_NF = plans_NHA.flatten(1).cpu().double()  # which not every device has
        centred_NF = flat_NF - flat_NF.mean(0)
        # A number that never changes correlates with nothing.
        scaled_NF = centred_NF / centred_NF.square().mean(0).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        own = torch.eye(flat_NF.shape[1], dtype=torch.float64)
        correlation = scaled_NF.T @ scaled_NF / len(flat_NF)
        # Fewer plans than numbers span a plane only; some white noise leads out of it.
        correlation = torch.lerp(correlation.masked_fill(own.bool(), 1), own, SHRINKAGE)
        return RecordedPlans(plans_NHA, torch.linalg.cholesky(correlation).float().to(plans_NHA.device))

    @staticmethod
    def from_model(model: WorldModel, horizon: int) -> RecordedPlans:
        """The sequences that a model remembers, as plans of this many blocks."""
        sequences = getattr(model, "recorded_actions", None)
        if sequences is None or not len(sequences):
            remedy = "Train it again or, after `lewm import-official`, import it with --dataset; or plan without"
            raise PlanningError(f"plan.icem.recorded asks for recorded actions, and this model has none. {remedy}.")
        steps = horizon * model.frame_skip
        if sequences.shape[1] < steps:
            raise PlanningError(
                f"plan.icem.recorded: a plan of {horizon} blocks has {steps} actions, the model's recorded "
                f"sequences have {sequences.shape[1]}. Plan for fewer blocks, or without."
            )
        raw = sequences[:, :steps].to(model.device).unflatten(1, (horizon, model.frame_skip))
        return RecordedPlans.of(model.normalise_actions(raw))

    def some(self, keys_B: torch.Tensor, samples: int, iteration: torch.Tensor) -> torch.Tensor:
        """``samples`` of the plans for each episode, others in each iteration until all were there: (B, S, H, A)."""
        numbers_S = iteration * samples + torch.arange(samples, device=keys_B.device)
        count = len(self.plans_NHA)
        return self.plans_NHA[(keys_B.remainder(count).unsqueeze(1) + numbers_S).remainder(count)]
