"""GCIQL, goal-conditioned implicit Q-learning (paper, "GC-RL"; Kostrikov et al., 2021; OGBench).

    L_Q = mean (Q(s, a, g) - (r + γ m V̄(s', g)))²
    L_V = mean L_τ(Q̄(s, a, g) - V(s, g)),     L_τ(u) = |τ - 1(u < 0)| u²
    L_π = mean min(exp(β A), 100) · -log π(a | s, g),     A = V(s', g) - V(s, g)               as published
    L_π = -mean Q̄(s, π(s, g), g) / mean |Q̄| - α mean log π(a | s, g)                          mended

r = -1 and m = 1, or both 0 where the goal is reached; V̄ and Q̄ follow V and Q. ``lewm.methods.offline`` has what it
shares with GCIVL, and says what the two variants are. As published, Q has no say in what the policy does. Mended, there
are two, of which the lesser counts, and the policy is drawn from them as OGBench does (DDPG+BC). That was measured
beside weights of exp(3 A) with A = Q̄(s, a, g) - V(s, g): of 100 pairs that are 50 steps apart it solved 93 and they 77,
after 150 noisy episodes of TwoRoom at compact size. The actor's loss is counted for each number of a block.
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
    TEMPERATURES: ClassVar[dict[str, float]] = {"published": 10.0}

    cloning: float = 1.0  # Alpha: what doing as was done counts beside Q, in the variant mended.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.cloning >= 0, "cloning", "at least 0")
        weighs = self.as_published or self.inverse_temperature is None
        self._require(weighs, "inverse_temperature", "left out in the variant mended, which has cloning instead")

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
        del draws
        moments = self.moments(batch)
        with self.precisely():
            acted_BCX = torch.cat([moments.value, moments.blocks], dim=-1).float()
            target_BC = self.arrives(moments.reached, self.slow_values.least(moments.value_next)).detach()
            q = (self.qs(acted_BCX).float() - target_BC).square().mean()
            difference_BC = self.slow_qs.least(acted_BCX).detach() - self.values.least(moments.value)
            value = expectile_loss(difference_BC.float(), self.settings.expectile).mean()
        actor = self.extraction(moments, peers)
        return Losses(q + value + actor, {"q": q, "value": value, "actor": actor})

    def extraction(self, moments: Moments, peers: Peers) -> torch.Tensor:
        """The actor's loss, (): as GCIVL's if published; else cloning, and what Q̄ says, for each number of a block."""
        if self.settings.as_published:
            return super().extraction(moments, peers)
        chosen_BCA = self.actor(moments.actor).float()
        with self.precisely():
            # Q̄ is not trained, and what is seen must not bend to please it: only actions may.
            q_BC = self.slow_qs.least(torch.cat([moments.actor.detach(), chosen_BCA], dim=-1))
        cloning_BC = self.settings.cloning * self.actor.surprise(moments.actor, moments.blocks)
        pleasing_BC = q_BC / peers.mean(q_BC.detach().abs().mean()) / self.settings.block_dim
        return (cloning_BC - pleasing_BC).mean()

    def followed(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        return {**super().followed(), "qs": (self.qs, self.slow_qs)}
