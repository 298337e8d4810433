"""DINO-WM (Zhou et al., 2024): a world model over the patch tokens of a frozen encoder (paper, appendix "DINO-WM").

    L = mean ‖ pred(z_t-2..t, a_t-2..t) - z_t+1 ‖²,      z_t the tokens that a frozen encoder makes of frame t

Nothing can collapse, because nothing in z is trained. An embedded action joins every token of its frame. Plans come
from the mean squared difference between the tokens of the last imagined frame and those of the goal.

The tokens are features: of an encoder of images in general, as in the paper, or those of another model here. Without
one they are pixels: the method then runs anywhere, and says so.

What the agent senses of itself (proprioception) can join: embedded, it stands beside every token, is predicted with it,
and has a share in the distance.

Departures from the original: the recipe is for runs of minutes, and features are divided by a constant. The predictor
ends in a LayerNorm, as the original's, so that its answers begin at a size of about 1. DINOv2's tokens have that size,
those of other encoders would be out of reach.

Shapes: B batch, T frames of a window, N tokens of a frame, F numbers of a token, with those of proprioception, of which
an agent senses P; A action block, D = N * F.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from lewm.config import MethodConfig, PredictorConfig, Preset, TrainConfig
from lewm.errors import ConfigError, PlanningError
from lewm.methods.base import Group, Method, blocks_apart
from lewm.methods.frozen import EFFICIENTNET, frozen_encoder
from lewm.model.token_predictor import TokenPredictor
from lewm.model.token_rollout import TokenRollout
from lewm.model.view import view
from lewm.types import Batch, DataFacts, DistanceFunction, EncoderFunction, Inputs, Losses, Peers, RolloutFunction

# -- hyper-parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DinoWMConfig(MethodConfig):
    """DINO-WM."""

    NAME: ClassVar[str] = "dino_wm"

    features: str | None = None  # The frozen encoder whose tokens are predicted; None: pixels, as below.
    image_size: int = 224  # Side of the frames, in pixels, where there are no features.
    patch_size: int = 14  # Side of a patch there, which becomes a token.
    patch_cells: int = 7  # A patch is averaged over so many times so many cells.
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    action_width: int = 10  # Numbers that an action block becomes; they join every token.
    proprio: bool = False  # Whether it reads what the agent senses of itself.
    proprio_width: int = 10  # Numbers that this becomes; they join every token.
    proprio_weight: float = 1.0  # Alpha, of its distance; that of what is seen has weight 1.
    history: int = 3  # Frames the predictor sees.
    frame_skip: int = 5  # Environment steps, and so primitive actions, from one frame to the next.
    action_dim: int = 2  # Size of a primitive action.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("image_size", "patch_size", "patch_cells", most=4096)
        self._check_positive("action_width", "proprio_width", most=1 << 16)
        self._require(self.proprio_weight >= 0, "proprio_weight", "at least 0")
        self._check_positive("history", "frame_skip", "action_dim", most=1000)
        self._require(self.image_size % self.patch_size == 0, "image_size", f"a multiple of {self.patch_size} (patch)")
        fits = self.patch_size % self.patch_cells == 0
        self._require(fits, "patch_cells", f"a divisor of {self.patch_size} (patch)")

    def inputs(self) -> Inputs:
        """Windows of ``history`` frames and the one after them."""
        size = None if self.features else self.image_size
        return Inputs(self.history + 1, self.frame_skip, self.action_dim, size, self.features, self.proprio)

    @classmethod
    def for_preset(cls, preset: Preset) -> tuple[DinoWMConfig, TrainConfig]:
        """In full size the original's predictor on features of natural images; small ones on pixels."""
        if preset.size == "full":
            train = TrainConfig(20_000, lr=5e-4, weight_decay=0.0, warmup_steps=300)
            return cls(EFFICIENTNET, preset.image_size, action_dim=preset.action_dim), preset.at_its_pace(train)
        cells, predictor, train = {
            "debug": (2, PredictorConfig(1, 2, 8, 32), TrainConfig(8, batch_size=4, lr=1e-3, warmup_steps=2)),
            "compact": (7, PredictorConfig(2, 4, 16, 128), TrainConfig(2000, batch_size=64, lr=1e-3, warmup_steps=100)),
        }[preset.size]
        small = cls(None, preset.image_size, 14, cells, predictor, action_dim=preset.action_dim)
        return small, preset.at_its_pace(train)

    def build(self, facts: DataFacts) -> DinoWM:
        return DinoWM(self, facts)

    @property
    def needs_background(self) -> bool:
        """A frame of the data shows of what size its features are."""
        return self.features is not None

    def rows(self) -> dict[str, str]:
        count, cells = (self.image_size // self.patch_size) ** 2, self.patch_cells
        pixels = f"none: {count} patches of {self.image_size} px frames, averaged over {cells} x {cells} cells"
        predictor = f"{self.predictor.depth} layers over the tokens of {self.history} frames"
        sensed = f"weight {self.proprio_weight:g}" if self.proprio else "none"
        return {"features": self.features or pixels, "proprioception": sensed, "predictor": predictor}


# -- the method ----------------------------------------------------------------------------------------------------


class DinoWM(Method):
    """A world model over the tokens of a frozen encoder. Planning sees the D numbers of a frame as one embedding."""

    settings: DinoWMConfig
    COLLAPSE_REMEDY = None  # what it sees with is frozen
    scale: torch.Tensor  # by which features are divided; part of the model
    proprio_mean: torch.Tensor
    proprio_std: torch.Tensor

    def __init__(self, settings: DinoWMConfig, facts: DataFacts | None = None) -> None:
        super().__init__(settings, facts)
        if settings.features:
            self.frozen_encoder = frozen_encoder(settings.features, self.facts.encoder)
            self.eyes, shape = self.frozen_encoder.module, self.frozen_encoder.shape
        else:
            shape = ((settings.image_size // settings.patch_size) ** 2, 3 * settings.patch_cells**2)
        if len(shape) not in (1, 2):
            raise ConfigError(f"method.features: {settings.features} gives features {shape}, not tokens (N, F).")
        self.tokens, self.seen_width = (1, *shape)[-2:]
        self.token_width = self.seen_width
        if settings.proprio:
            self._build_proprio()
        self.predictor = TokenPredictor(
            settings.history,
            self.tokens,
            self.token_width,
            settings.frame_skip * settings.action_dim,
            settings.action_width,
            settings.predictor,
        )
        self.register_buffer("scale", torch.tensor(self._size_of_features()))

    def _size_of_features(self) -> float:
        """The size of a number in the largest token of a frame without what moves; 1 where none is known."""
        if not self.settings.features or self.facts.background is None:
            return 1.0
        tokens_NF = self._as_tokens(self.frozen_encoder(torch.from_numpy(self.facts.background)[None])[0])
        largest = tokens_NF.square().mean(-1).max().sqrt().clamp_min(2.0**-100).item()
        return 2.0 ** round(math.log2(largest))  # a power of two, so that dividing by it rounds nothing

    def _build_proprio(self) -> None:
        stats = self.facts.proprio
        if stats is None or not stats.mean:
            problem = "method.proprio asks for what the agent senses of itself, and nothing is known of it"
            raise ConfigError(f"{problem}. Train on a dataset that has it, or without.")
        self.proprio_embedder = nn.Linear(len(stats.mean), self.settings.proprio_width)
        self.token_width += self.settings.proprio_width
        self.register_buffer("proprio_mean", torch.tensor(stats.mean), persistent=False)
        self.register_buffer("proprio_std", torch.tensor(stats.std), persistent=False)

    @property
    def history(self) -> int:
        return self.settings.history

    @property
    def image_size(self) -> int:
        return self.frozen_encoder.image_size if self.settings.features else self.settings.image_size

    @property
    def device(self) -> torch.device:
        return self.predictor.positions.device

    # -- training --------------------------------------------------------------------------------------------------

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """Squared error of every frame but the first, each predicted from those before it in the window."""
        del draws, peers
        if batch.features is not None:
            z_BTNF = self._as_tokens(batch.features) / self.scale
        else:
            assert batch.pixels is not None
            z_BTNF = self.see(batch.pixels)
        embedded_BTF = z_BTNF.mean(-2)  # for the diagnostics: all tokens would have millions of covariances
        if self.settings.proprio:
            z_BTNF = self.joined(z_BTNF, batch.proprio)
        actions_BTA = self.normalise_actions(batch.actions)
        predicted_BTNF = self.predictor(z_BTNF[:, :-1], actions_BTA[:, :-1]).float()
        error = F.mse_loss(predicted_BTNF, z_BTNF[:, 1:].detach())
        return Losses(error, {"prediction": error}, embedded_BTF)

    def joined(self, z_BTNF: torch.Tensor, proprio: torch.Tensor | None) -> torch.Tensor:
        """Tokens (..., N, F) with the embedding of proprioception (..., P) beside each, (..., N, F + E)."""
        assert proprio is not None
        embedded = self.proprio_embedder((proprio - self.proprio_mean) / self.proprio_std)
        return torch.cat([z_BTNF, embedded.float().unsqueeze(-2).expand(*z_BTNF.shape[:-1], -1)], dim=-1)

    @torch.no_grad()
    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 frames (..., R, R, 3) -> tokens (..., N, F), float32."""
        self.check_frames(pixels)
        if not self.settings.features:
            return pixel_tokens(pixels, self.settings.patch_size, self.settings.patch_cells)
        leading = pixels.shape[:-3]
        return self._as_tokens(self.frozen_encoder(pixels.flatten(0, -4)).unflatten(0, leading)) / self.scale

    def _as_tokens(self, features: torch.Tensor) -> torch.Tensor:
        """Features (..., N, F), or (..., F) of encoders that give one token, -> (..., N, F)."""
        tokens = features.float()
        return tokens if len(self.frozen_encoder.shape) == 2 else tokens.unsqueeze(-2)

    def frozen(self) -> tuple[nn.Module, ...]:
        return (self.eyes,) if self.settings.features else ()

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        fast = view(self)
        fast.predictor = self.predictor.compiled(compile)
        return fast

    def groups(self) -> list[Group]:
        return blocks_apart(self)

    # -- planning --------------------------------------------------------------------------------------------------

    def rollout(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """Imagine S futures from each of B contexts: predictions (B, S, H, D). As ``planning_rollout``, step by step.

        z_BTD: flattened tokens of the T real frames, oldest first.  past_BTA: the T-1 action blocks executed between
        them.  actions_BSHA: candidate plans; their first block acts on the last real frame.
        """
        b, s, horizon, _ = actions_BSHA.shape
        context = z_BTD.shape[1]
        if past_BTA.shape[1] != context - 1:
            raise PlanningError(
                f"{context} frames need {context - 1} action blocks between them, got {past_BTA.shape[1]}."
            )
        z = z_BTD.unflatten(-1, (self.tokens, self.token_width)).repeat_interleave(s, 0)
        actions = torch.cat([past_BTA.unsqueeze(1).expand(-1, s, -1, -1), actions_BSHA], dim=2).flatten(0, 1)
        for end in range(context, context + horizon):
            seen = slice(max(0, end - self.history), end)
            z = torch.cat([z, self.predictor(z[:, seen], actions[:, seen])[:, -1:]], dim=1)
        return z[:, context:].flatten(-2).view(b, s, horizon, -1)

    def planning_encoder(self, precision: str = "auto") -> EncoderFunction:
        """uint8 frames (..., R, R, 3), and proprioception (..., P) if it is read -> flattened tokens (..., D).

        In the precision of the features, whatever the one that is asked for; with a frozen copy of what is not frozen.
        """
        del precision
        seen = {id(module): module for module in self.frozen()}  # large, and never to be changed
        frozen = copy.deepcopy(self, memo=dict(seen)).eval().requires_grad_(False)
        if not self.settings.proprio:
            return lambda pixels: frozen.see(pixels).flatten(-2)
        return lambda pixels, proprio: frozen.joined(frozen.see(pixels), proprio).flatten(-2)

    def planning_rollout(self, precision: str = "auto", differentiable: bool = False) -> RolloutFunction:
        """``rollout`` for less work, with a frozen copy of the weights.

        precision: "float32", "bf16", or "auto": bf16 on CUDA.  differentiable: gradients with respect to the actions.
        """
        return TokenRollout(self.predictor, precision, differentiable).predictions

    def planning_distances(self, precision: str = "auto", differentiable: bool = False) -> DistanceFunction:
        """The paper's cost, after each block: mean squared differences to the goal's tokens.

        That of proprioception is a mean of its own, with its weight. Arguments as for ``planning_rollout``. Of the
        frames that are imagined nothing else is kept.
        """
        sensed = self.token_width - self.seen_width
        shares = [1 / self.seen_width] * self.seen_width + [self.settings.proprio_weight / max(1, sensed)] * sensed
        return TokenRollout(self.predictor, precision, differentiable, shares).distances

    def rollout_flops(self, context: int, horizon: int) -> int:
        """Floating-point operations of ``rollout`` for one candidate, from so many frames over so many blocks.

        Of every window as a whole, as they are counted for others: what is kept of a window buys no more search.
        """
        return sum(self.predictor.flops(min(end, self.history)) for end in range(context, context + horizon))


def pixel_tokens(pixels: torch.Tensor, patch_size: int, cells: int) -> torch.Tensor:
    """uint8 frames (..., R, R, 3) -> the colours of each patch's cells, (..., N, 3 * cells²), from -1 to 1."""
    side, cell = pixels.shape[-2] // patch_size, patch_size // cells
    grid = pixels.float().unflatten(-3, (side, cells, cell)).unflatten(-2, (side, cells, cell))
    # (..., side, cells, cell, side, cells, cell, 3): a mean over cells, then patches in front of cells.
    colours = grid.mean((-5, -2)).transpose(-4, -3)
    return colours.flatten(-5, -4).flatten(-3) / 127.5 - 1
