"""PLDM (Sobal et al., 2025), the paper's other end-to-end world model: seven terms instead of two (appendix "PLDM").

    L = L_pred + α L_var + β L_cov + γ L_time-sim + ζ L_time-var + ν L_time-cov + μ L_IDM

Networks, data and planning are LeWM's; only the objective differs. Two formulas of the paper's appendix are taken as
the released code has them: its covariance term lacks the square and divides by D, and epsilon stands outside the root.

Two variants:
- authors: the paper's. Every term reads all frames of a window; predictions are of one block each.
- original: that of the method's own project, with inverse dynamics. Variance and covariance over the batch read the
  first frame, the three terms over time those after it, and the prediction is rolled out from the first frame. Its
  windows had 16 frames, a GRU and no projector; here they are the house's.

Shapes: B batch, T frames of a window, D embedding, A action block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from lewm.checked import Checked
from lewm.config import LARGEST_LAYER, JEPAConfig, MethodConfig, Preset, TrainConfig
from lewm.methods.base import Group, Method, blocks_apart
from lewm.model.jepa import JEPA
from lewm.model.projector import measuring
from lewm.types import Batch, DataFacts, Losses, Peers

EPSILON = 1e-4  # of variances

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights(Checked):
    """Of the terms. Those of weight 0 are not computed. None: the variant's."""

    SECTION: ClassVar[str] = "method.weights"

    variance: float | None = None  # Alpha: embeddings differ over the batch.
    covariance: float | None = None  # Beta: their numbers do so independently.
    similarity: float | None = None  # Gamma: successive embeddings are alike.
    time_variance: float | None = None  # Zeta: embeddings differ over time.
    time_covariance: float | None = None  # Nu: their numbers do so independently.
    inverse_dynamics: float | None = None  # Mu: actions can be read off successive embeddings.

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in asdict(self).items():
            self._require(weight is None or weight >= 0, name, "at least 0")


WEIGHTS: dict[str, dict[str, float]] = {
    "authors": {  # found by a grid search on Push-T
        "variance": 18.0,
        "covariance": 12.0,
        "similarity": 0.2,
        "time_variance": 0.7,
        "time_covariance": 0.0,
        "inverse_dynamics": 0.0,
    },
    "original": {  # found for two rooms
        "variance": 3.9843,
        "covariance": 6.9238,
        "similarity": 0.74242,
        "time_variance": 0.24535,
        "time_covariance": 0.0,
        "inverse_dynamics": 1.072,
    },
}

STEPS = {"tworoom": 12_000, "reacher": 12_000, "cube": 50_000}  # in full size


@dataclass(frozen=True)
class PLDMConfig(JEPAConfig, MethodConfig):
    """PLDM."""

    NAME: ClassVar[str] = "pldm"

    variant: Literal["authors", "original"] = "authors"  # The paper's, or that of the project that introduced it.
    weights: Weights = field(default_factory=Weights)
    centred_similarity: bool = False  # Subtract the batch's mean before comparing successive frames, as released.
    inverse_width: int = 512  # Hidden size of the inverse dynamics.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("inverse_width", most=LARGEST_LAYER)
        over_time = self.history >= 3 or self.variant == "authors"
        self._require(over_time, "history", "at least 3 in the variant original, whose terms over time leave one out")

    @property
    def weighed(self) -> dict[str, float]:
        """The weight of each term but the prediction's: as given, or else the variant's."""
        given = {name: weight for name, weight in asdict(self.weights).items() if weight is not None}
        return WEIGHTS[self.variant] | given

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[PLDMConfig, TrainConfig]:
        """LeWM's networks and as many steps; the released recipe, with a learning rate for runs of minutes."""
        train = {
            "debug": TrainConfig(steps=8, batch_size=4, lr=1e-3, warmup_steps=2),
            "compact": TrainConfig(2000, batch_size=64, lr=2e-3, warmup_steps=100),
            "full": TrainConfig(STEPS.get(preset.name, 20_000), lr=3e-4, warmup_steps=300),
        }[preset.size]
        return cls.sized(preset), preset.at_its_pace(train)

    def build(self, facts: DataFacts) -> PLDM:
        return PLDM(self, facts)

    def rows(self) -> dict[str, str]:
        terms = ", ".join(f"{name.replace('_', ' ')} {weight:g}" for name, weight in self.weighed.items() if weight)
        return {**super().rows(), "variant": self.variant, "weights": terms}


# -- the method ----------------------------------------------------------------------------------------------------


class PLDM(JEPA, Method):
    """A latent world model kept from collapsing by variances and covariances. Shapes as in ``lewm.types``."""

    settings: PLDMConfig
    COLLAPSE_REMEDY = "Raise method.weights.variance or lower train.lr."

    def __init__(self, settings: PLDMConfig, facts: DataFacts | None = None) -> None:
        Method.__init__(self, settings, facts)
        self.build_networks(settings, self.facts.background)
        if settings.weighed["inverse_dynamics"]:
            hidden = settings.inverse_width
            self.inverse_dynamics = nn.Sequential(
                nn.Linear(2 * settings.embed_dim, hidden), nn.ReLU(), nn.Linear(hidden, settings.block_dim)
            )

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """The objective, for windows of history + 1 frames; nothing is detached."""
        del draws
        original, weights = self.settings.variant == "original", self.settings.weighed
        embedded_BTD, predicted_BTD = self.embed_and_roll_out(batch) if original else self.embed_and_predict(batch)
        z_BTD = embedded_BTD.float()
        centred_BTD = z_BTD - peers.mean(z_BTD.mean(0))
        apart_BTD = centred_BTD[:, :1] if original else centred_BTD  # what is to differ over the batch
        over_time_BTD, first = (z_BTD[:, 1:], 1) if original else (z_BTD, 0)
        terms = {"prediction": F.mse_loss(predicted_BTD.float(), z_BTD[:, 1:])}
        if weights["variance"]:
            terms["variance"] = variance_term(batch_variance(apart_BTD, peers))
        if weights["covariance"]:
            terms["covariance"] = covariance_term(batch_covariance(apart_BTD, peers))
        if weights["similarity"]:
            compared_BTD = centred_BTD[:, first:] if self.settings.centred_similarity else over_time_BTD
            terms["similarity"] = compared_BTD.diff(dim=1).square().mean()
        if weights["time_variance"]:
            terms["time_variance"] = variance_term(over_time_BTD.var(dim=1))
        if weights["time_covariance"]:
            terms["time_covariance"] = covariance_term(time_covariance(over_time_BTD))
        if weights["inverse_dynamics"]:
            terms["inverse_dynamics"] = self._inverse_dynamics_term(z_BTD, batch)
        total = terms["prediction"] + sum(weights[n] * term for n, term in terms.items() if n != "prediction")
        return Losses(total, terms, embedded_BTD)

    def embed_and_roll_out(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``embed_and_predict``, but each prediction (B, T-1, D) rests on those before it, the first on a frame."""
        assert batch.pixels is not None
        z_BTD, actions_BTA = self.encode(batch.pixels), self.normalise_actions(batch.actions)
        return z_BTD, self._roll_out(z_BTD, actions_BTA)

    def _roll_out(self, z_BTD: torch.Tensor, actions_BTA: torch.Tensor) -> torch.Tensor:
        return self.rollout(z_BTD[:, :1], actions_BTA[:, :0], actions_BTA[:, None, :-1])[:, 0]

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch]) -> None:
        """As every JEPA's; predictions that were rolled out in training are rolled out here."""
        if self.settings.variant == "authors":
            super().calibrate(batches)
            return
        kept = list(batches)
        super().calibrate(kept)
        self.predictor.train()  # dropout is as in training
        with measuring(self.prediction_projector):
            for batch in kept:
                self.embed_and_roll_out(batch)
        self.predictor.eval()

    def _inverse_dynamics_term(self, z_BTD: torch.Tensor, batch: Batch) -> torch.Tensor:
        actions_BTA = self.normalise_actions(batch.actions)[:, :-1]
        read_BTA = self.inverse_dynamics(torch.cat([z_BTD[:, 1:], z_BTD[:, :-1]], dim=-1))
        return F.mse_loss(read_BTA.float(), actions_BTA)

    def groups(self) -> list[Group]:
        """The inverse dynamics is clipped apart, as by an optimiser of its own."""
        own = set(self.inverse_dynamics.parameters()) if self.settings.weighed["inverse_dynamics"] else set()
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
