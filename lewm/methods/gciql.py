"""GCIQL, goal-conditioned implicit Q-learning (paper, "GC-RL"; Kostrikov et al., 2021; OGBench).

    L_Q = mean (Q(s, a, g) - (r + γ m V̄(s', g)))²
    L_V = mean L_τ(Q̄(s, a, g) - V(s, g)),     L_τ(u) = |τ - 1(u < 0)| u²
    L_π = mean min(exp(β A), 100) · -log π(a | s, g)

r = -1 and m = 1, or both 0 where the goal is reached; V̄ and Q̄ follow V and Q. ``lewm.methods.offline`` has what it
shares with GCIVL, and says what the two variants are. They differ in two more things here:

- published: one Q, and A = V(s', g) - V(s, g), which leaves Q without a say in what the policy does.
- mended: the lesser of two Q's, and A = Q̄(s, a, g) - V(s, g).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from lewm.methods.offline import Moments, Offline, OfflineConfig, slow_copy
from lewm.model.policy import Values, expectile_loss
from lewm.types import Batch, DataFacts, Losses, Peers

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GCIQLConfig(OfflineConfig):
    """Goal-conditioned implicit Q-learning."""

    NAME: ClassVar[str] = "gciql"
    TEMPERATURES: ClassVar[dict[str, float]] = {"published": 10.0, "mended": 3.0}

    def build(self, facts: DataFacts) -> GCIQL:
        return GCIQL(self, facts)


# -- the method ----------------------------------------------------------------------------------------------------


class GCIQL(Offline):
    """A value of hindsight goals, learned through one of actions, and a policy. Shapes as in ``lewm.types``."""

    settings: GCIQLConfig

    def __init__(self, settings: GCIQLConfig, facts: DataFacts | None = None) -> None:
        super().__init__(settings, facts)
        count = 1 if settings.as_published else 2
        self.qs = Values(self.question_size + settings.block_dim, settings.width, settings.depth, count)
        self.slow_qs = slow_copy(self.qs)

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """Regression of Q, expectile regression of V, and advantage-weighted regression of the actor."""
        del draws, peers
        moments = self.moments(batch)
        with self.precisely():
            acted_BCX = torch.cat([moments.value, moments.blocks], dim=-1).float()
            target_BC = self.arrives(moments.reached, self.slow_values.least(moments.value_next)).detach()
            q = (self.qs(acted_BCX).float() - target_BC).square().mean()
            difference_BC = self.slow_qs.least(acted_BCX).detach() - self.values.least(moments.value)
            value = expectile_loss(difference_BC.float(), self.settings.expectile).mean()
            advantage_BC = self._advantage(moments)
        actor = self.extraction(moments, advantage_BC)
        return Losses(q + value + actor, {"q": q, "value": value, "actor": actor})

    @torch.no_grad()
    def _advantage(self, moments: Moments) -> torch.Tensor:
        """How much better than usual it was to do what was done, for the actor's goal, (B, C)."""
        if self.settings.as_published:
            return self.progress(moments)
        acted_BCX = torch.cat([moments.actor, moments.blocks], dim=-1)
        return self.slow_qs.least(acted_BCX) - self.values.least(moments.actor)

    def followed(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        return {**super().followed(), "qs": (self.qs, self.slow_qs)}
