"""GCIVL, goal-conditioned implicit value learning: IQL without its Q (paper, "GC-RL"; OGBench).

    L_V = mean L_τ(r + γ m V̄(s', g) - V(s, g)),     L_τ(u) = |τ - 1(u < 0)| u²
    L_π = mean min(exp(β A), 100) · -log π(a | s, g),     A = V(s', g) - V(s, g)

r = -1 and m = 1, or both 0 where the goal is reached; V̄ follows V. ``lewm.methods.offline`` has what it shares with
GCIQL, and says what the two variants are. Mended, β is 1: an encoder that is trained along learns little from weights
that differ a hundredfold while V is still rough. On TwoRoom at compact size 98 of 100 pairs were solved then, and 33
with a β of 3. On frozen features both solve 98.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lewm.methods.offline import Offline, OfflineConfig
from lewm.model.policy import expectile_loss
from lewm.types import Batch, DataFacts, Losses, Peers

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GCIVLConfig(OfflineConfig):
    """Goal-conditioned implicit value learning."""

    NAME: ClassVar[str] = "gcivl"
    TEMPERATURES: ClassVar[dict[str, float]] = {"published": 3.0, "mended": 1.0}

    def build(self, facts: DataFacts) -> GCIVL:
        return GCIVL(self, facts)


# -- the method ----------------------------------------------------------------------------------------------------


class GCIVL(Offline):
    """A value of hindsight goals, and a policy drawn from it. Shapes as in ``lewm.types``."""

    settings: GCIVLConfig

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """Expectile regression of the value, and advantage-weighted regression of the actor."""
        del draws
        moments = self.moments(batch)
        with self.precisely():
            target_BC = self.arrives(moments.reached, self.slow_values.least(moments.value_next))
            difference_BC = target_BC.detach() - self.values.least(moments.value).float()
            value = expectile_loss(difference_BC, self.settings.expectile).mean()
        actor = self.extraction(moments, peers)
        return Losses(value + actor, {"value": value, "actor": actor})
