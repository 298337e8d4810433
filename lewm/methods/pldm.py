"""PLDM (Sobal et al., 2025), the paper's other end-to-end world model: seven terms instead of two (appendix "PLDM").

    L = L_pred + α L_var + β L_cov + γ L_time-sim + ζ L_time-var + ν L_time-cov + μ L_IDM

Networks, data and planning are LeWM's; only the objective differs. Two formulas of the paper's appendix are taken as
the released code has them: its covariance term lacks the square and divides by D, and epsilon stands outside the root.

Shapes: B batch, T frames of a window, D embedding, A action block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from lewm.checked import Checked
from lewm.config import JEPAConfig, MethodConfig, Preset, TrainConfig
from lewm.methods.base import Group, Method, blocks_apart
from lewm.model.jepa import JEPA
from lewm.types import Batch, DataFacts, Losses, Peers

EPSILON = 1e-4  # of variances

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights(Checked):
    """Of the terms; the paper's, found by a grid search on Push-T. Those of weight 0 are not computed."""

    SECTION: ClassVar[str] = "method.weights"

    variance: float = 18.0  # Alpha: embeddings differ over the batch.
    covariance: float = 12.0  # Beta: their numbers do so independently.
    similarity: float = 0.2  # Gamma: successive embeddings are alike.
    time_variance: float = 0.7  # Zeta: embeddings differ over time.
    time_covariance: float = 0.0  # Nu: their numbers do so independently.
    inverse_dynamics: float = 0.0  # Mu: actions can be read off successive embeddings.

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in asdict(self).items():
            self._require(weight >= 0, name, "at least 0")


@dataclass(frozen=True)
class PLDMConfig(JEPAConfig, MethodConfig):
    """PLDM."""

    NAME: ClassVar[str] = "pldm"

    weights: Weights = field(default_factory=Weights)
    centred_similarity: bool = False  # Subtract the batch's mean before comparing successive frames, as released.
    inverse_width: int = 512  # Hidden size of the inverse dynamics.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("inverse_width", most=1 << 16)

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[PLDMConfig, TrainConfig]:
        """LeWM's networks; the released recipe, with a learning rate for runs of minutes."""
        train = {
            "debug": TrainConfig(steps=8, batch_size=4, lr=1e-3, warmup_steps=2),
            "compact": TrainConfig(2000, batch_size=64, lr=2e-3, warmup_steps=100),
            "full": TrainConfig(20_000, lr=3e-4, warmup_steps=300),
        }[preset.size]
        return cls.sized(preset), preset.at_its_pace(train)

    def build(self, facts: DataFacts) -> PLDM:
        return PLDM(self, facts)

    def rows(self) -> dict[str, str]:
        given = asdict(self.weights).items()
        terms = ", ".join(f"{name.replace('_', ' ')} {weight:g}" for name, weight in given if weight)
        return {**super().rows(), "weights": terms}


# -- the method ----------------------------------------------------------------------------------------------------


class PLDM(JEPA, Method):
    """A latent world model kept from collapsing by variances and covariances. Shapes as in ``lewm.types``."""

    settings: PLDMConfig
    COLLAPSE_REMEDY = "Raise method.weights.variance or lower train.lr."

    def __init__(self, settings: PLDMConfig, facts: DataFacts | None = None) -> None:
        Method.__init__(self, settings, facts)
        self.build_networks(settings, self.facts.background)
        if settings.weights.inverse_dynamics:
            hidden = settings.inverse_width
            self.inverse_dynamics = nn.Sequential(
                nn.Linear(2 * settings.embed_dim, hidden), nn.ReLU(), nn.Linear(hidden, settings.block_dim)
            )

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """The objective, for windows of history + 1 frames; nothing is detached."""
        del draws
        embedded_BTD, predicted_BTD = self.embed_and_predict(batch)
        z_BTD, weights = embedded_BTD.float(), self.settings.weights
        centred_BTD = z_BTD - peers.mean(z_BTD.mean(0))
        terms = {"prediction": F.mse_loss(predicted_BTD.float(), z_BTD[:, 1:])}
        if weights.variance:
            terms["variance"] = variance_term(batch_variance(centred_BTD, peers))
        if weights.covariance:
            terms["covariance"] = covariance_term(batch_covariance(centred_BTD, peers))
        if weights.similarity:
            compared_BTD = centred_BTD if self.settings.centred_similarity else z_BTD
            terms["similarity"] = compared_BTD.diff(dim=1).square().mean()
        if weights.time_variance:
            terms["time_variance"] = variance_term(z_BTD.var(dim=1))
        if weights.time_covariance:
            terms["time_covariance"] = covariance_term(time_covariance(z_BTD))
        if weights.inverse_dynamics:
            terms["inverse_dynamics"] = self._inverse_dynamics_term(z_BTD, batch)
        total = terms["prediction"] + sum(getattr(weights, n) * term for n, term in terms.items() if n != "prediction")
        return Losses(total, terms, embedded_BTD)

    def _inverse_dynamics_term(self, z_BTD: torch.Tensor, batch: Batch) -> torch.Tensor:
        actions_BTA = self.normalise_actions(batch.actions)[:, :-1]
        read_BTA = self.inverse_dynamics(torch.cat([z_BTD[:, 1:], z_BTD[:, :-1]], dim=-1))
        return F.mse_loss(read_BTA.float(), actions_BTA)

    def groups(self) -> list[Group]:
        """The inverse dynamics is clipped apart, as by an optimiser of its own."""
        own = set(self.inverse_dynamics.parameters()) if self.settings.weights.inverse_dynamics else set()
        shared = [
            Group(tuple(p for p in group.parameters if p not in own), muon=group.muon) for group in blocks_apart(self)
        ]
        return [*shared, Group(tuple(p for p in self.parameters() if p in own), clip="inverse dynamics")]


# -- its terms -----------------------------------------------------------------------------------------------------


def batch_variance(centred_BTD: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Unbiased variance over the whole batch, (T, D), of embeddings less their mean over it."""
    count = len(centred_BTD) * peers.count
    return peers.mean(centred_BTD.square().mean(0)) * (count / (count - 1))


def batch_covariance(centred_BTD: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Unbiased covariance over the whole batch, (T, D, D), of embeddings less their mean over it."""
    count, z_TBD = len(centred_BTD) * peers.count, centred_BTD.transpose(0, 1)
    return peers.mean(z_TBD.mT @ z_TBD / len(centred_BTD)) * (count / (count - 1))


def time_covariance(z_BTD: torch.Tensor) -> torch.Tensor:
    """Unbiased covariance over the time of each window, (B, D, D)."""
    centred_BTD = z_BTD - z_BTD.mean(1, keepdim=True)
    return centred_BTD.mT @ centred_BTD / (z_BTD.shape[1] - 1)


def variance_term(variance: torch.Tensor) -> torch.Tensor:
    """How far standard deviations are below 1, on average."""
    return F.relu(1 - (variance + EPSILON).sqrt()).mean()


def covariance_term(covariance_NDD: torch.Tensor) -> torch.Tensor:
    """Mean square of what is off the diagonal of covariances (N, D, D)."""
    d = covariance_NDD.shape[-1]
    squares = covariance_NDD.square()
    off_diagonal_N = squares.sum((-2, -1)) - squares.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (off_diagonal_N / (d * d - d)).mean()
