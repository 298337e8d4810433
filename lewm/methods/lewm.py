"""LeWM, the method of the paper (Algorithm 1): two loss terms, no stop-gradient, no moving averages.

L = L_pred + lambda * SIGReg(Z),      L_pred = mean ‖ pred(z_t, a_t) - z_{t+1} ‖²

The paper's ablation adds a third: a decoder draws each frame of its embedding (``reconstruction``; appendix "Decoder").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from lewm.checked import Checked, later
from lewm.config import JEPAConfig, MethodConfig, Preset, TrainConfig
from lewm.methods.base import Group, Method, blocks_apart
from lewm.model.decoder import Decoder
from lewm.model.jepa import JEPA
from lewm.model.sigreg import SIGReg, random_directions
from lewm.model.view import view
from lewm.types import Batch, DataFacts, Losses, Peers

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SigregConfig(Checked):
    """Sketched isotropic Gaussian regularisation."""

    SECTION: ClassVar[str] = "method.sigreg"

    weight: float = 0.09  # Lambda. The paper's text has 0.1.
    directions: int = 1024  # Random projections per step.
    knots: int = 17  # Points of the quadrature.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("directions", most=1 << 20)
        self._require(self.weight >= 0, "weight", "at least 0")
        self._require(2 <= self.knots <= 10_000, "knots", "at least 2 and at most 10,000")


@dataclass(frozen=True)
class LeWMConfig(JEPAConfig, MethodConfig):
    """LeWM."""

    NAME: ClassVar[str] = "lewm"

    sigreg: SigregConfig = field(default_factory=SigregConfig)
    reconstruction: float = later(0.0)  # Weight of drawing frames from embeddings, the paper's ablation; 0: no decoder.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.reconstruction >= 0, "reconstruction", "at least 0")

    @property
    def needs_background(self) -> bool:
        """A decoder draws what differs from it."""
        return super().needs_background or self.reconstruction > 0

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[LeWMConfig, TrainConfig]:
        """Small where the world is; in full size the released network with a recipe for minutes on a GPU."""
        steps, weight = WORLDS.get(preset.name, (20_000, SigregConfig.weight))
        sigreg, train = {
            "debug": (SigregConfig(directions=16), TrainConfig(steps=8, batch_size=4, lr=1e-3, warmup_steps=2)),
            "compact": (SigregConfig(directions=256), TrainConfig(2000, batch_size=64, lr=3e-3, warmup_steps=100)),
            "full": (SigregConfig(weight), TrainConfig(steps, optimizer="muon", lr=2e-3, warmup_steps=300)),
        }[preset.size]
        return cls.sized(preset, sigreg=sigreg), preset.at_its_pace(train)

    def build(self, facts: DataFacts) -> LeWM:
        return LeWM(self, facts)

    def rows(self) -> dict[str, str]:
        sigreg = f"weight {self.sigreg.weight:g}, {self.sigreg.directions} directions"
        drawn = {"reconstruction": f"weight {self.reconstruction:g}"} if self.reconstruction else {}
        return {**super().rows(), "SIGReg": sigreg, **drawn}


# Steps and lambda in full size. With a lighter lambda TwoRoom's and Reacher's distances reach farther; Cube's needs to
# be heavier (docs/notebook/lighter-sigreg.md).
WORLDS = {"tworoom": (12_000, 0.005), "pusht": (20_000, 0.09), "reacher": (12_000, 0.005), "cube": (50_000, 0.3)}

# -- the method ----------------------------------------------------------------------------------------------------


class LeWM(JEPA, Method):
    """A latent world model that is trained end to end. Shapes as in ``lewm.types``."""

    settings: LeWMConfig
    COLLAPSE_REMEDY = "Raise method.sigreg.weight or lower train.lr."

    def __init__(self, settings: LeWMConfig, facts: DataFacts | None = None) -> None:
        Method.__init__(self, settings, facts)
        self.build_networks(settings, self.facts.background)
        self.sigreg = SIGReg(settings.sigreg.knots)
        if settings.reconstruction:
            self.decoder = Decoder(settings.embed_dim, settings.encoder.image_size, self.facts.background)

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """Algorithm 1, for windows of history + 1 frames, along the directions of the step."""
        z_BTD, predicted_BTD = self.embed_and_predict(batch)
        prediction = F.mse_loss(predicted_BTD.float(), z_BTD[:, 1:].float())
        sigreg = self.sigreg(z_BTD.transpose(0, 1), draws["directions"], peers)
        total = prediction + self.settings.sigreg.weight * sigreg
        terms = {"prediction": prediction, "sigreg": sigreg}
        if self.settings.reconstruction:
            assert batch.pixels is not None
            terms["reconstruction"] = self.decoder.loss(z_BTD.flatten(0, 1), batch.pixels.flatten(0, 1))
            total = total + self.settings.reconstruction * terms["reconstruction"]
        return Losses(total, terms, z_BTD)

    def draws(self, seed: int, step: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Fresh directions for each step."""
        count = self.settings.sigreg.directions
        return {"directions": random_directions(self.settings.embed_dim, count, seed, step, device)}

    def groups(self) -> list[Group]:
        return blocks_apart(self)

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        fast = super().compiled(compile)
        fast.sigreg = view(self.sigreg)
        fast.sigreg.characteristic_function = compile(self.sigreg.characteristic_function)
        return fast
