"""The networks that LeWM and PLDM share: an encoder and a predictor in one latent space (paper, Eq. "LeWM").

    Encoder:     z_t      = enc(o_t)
    Predictor:   ẑ_{t+1}  = pred(z_t, a_t)

What is minimised is for the methods to say. Planning asks for ``planning_encoder`` and ``planning_rollout``: the same
numbers as ``encode`` and ``rollout``, faster.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import nn

from lewm.config import JEPAConfig
from lewm.errors import PlanningError
from lewm.kernels.rollout import choose_rollout, planning_dtype
from lewm.model.encoder import Encoder, make_encoder
from lewm.model.flops import rollout_flops
from lewm.model.predictor import ActionEmbedder, Predictor
from lewm.model.projector import Projector, measuring, set_statistics
from lewm.model.view import view
from lewm.types import Array, Batch, EncoderFunction, RolloutFunction


class JEPA(nn.Module):
    """A latent world model without a loss. Shapes as in ``lewm.types``; actions are z-scored blocks.

    A method inherits it beside ``Method``, which brings the conversion of raw actions, and calls ``build_networks``.
    """

    settings: JEPAConfig  # the method's settings
    normalise_actions: Callable[[torch.Tensor], torch.Tensor]  # the method's
    check_frames: Callable[[torch.Tensor], None]  # the method's

    def build_networks(self, settings: JEPAConfig, background: Array | None = None) -> None:
        """Make the networks. background: uint8 (R, R, 3), for encoders that leave it out."""
        self.encoder: Encoder = make_encoder(settings.encoder, background)
        self.projector = Projector(settings.encoder.out_width, settings.projector_width, settings.embed_dim)
        self.action_embedder = ActionEmbedder(settings.block_dim, settings.action_bottleneck, settings.embed_dim)
        self.predictor = Predictor(settings)
        self.prediction_projector = Projector(settings.embed_dim, settings.projector_width, settings.embed_dim)

    @property
    def history(self) -> int:
        return self.settings.history

    @property
    def device(self) -> torch.device:
        return self.predictor.positions.device

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """z = enc(o): uint8 frames (..., R, R, 3) -> embeddings (..., D)."""
        self.check_frames(pixels)
        leading, frame = pixels.shape[:-3], pixels.shape[-3:]
        z = self.projector(self.encoder(pixels.reshape(-1, *frame)))
        return z.view(*leading, -1)

    def predict(self, z_BTD: torch.Tensor, actions_BTA: torch.Tensor) -> torch.Tensor:
        """ẑ_{t+1} = pred(z_1..t, a_1..t) for every t at once, T <= history -> (B, T, D)."""
        return self._predict_next(z_BTD, self.action_embedder(actions_BTA))

    def rollout(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """Imagine S futures from each of B contexts: predictions (B, S, H, D).

        z_BTD: embeddings of the T real frames, oldest first.  past_BTA: the T-1 action blocks executed between
        them.  actions_BSHA: candidate plans; their first block acts on the last real frame. Predictions feed
        back into a window of the last ``history`` embeddings.
        """
        b, s, horizon, _ = actions_BSHA.shape
        context = z_BTD.shape[1]
        if past_BTA.shape[1] != context - 1:
            raise PlanningError(
                f"A context of {context} frames needs the {context - 1} action blocks between them, "
                f"got {past_BTA.shape[1]}."
            )
        z = z_BTD.unsqueeze(1).expand(-1, s, -1, -1).flatten(0, 1)
        past = past_BTA.unsqueeze(1).expand(-1, s, -1, -1)
        action = self.action_embedder(torch.cat([past, actions_BSHA], dim=2).flatten(0, 1))
        for end in range(context, context + horizon):
            start = max(0, end - self.history)
            z_next = self._predict_next(z[:, start:end], action[:, start:end])[:, -1:]
            z = torch.cat([z, z_next], dim=1)
        return z[:, context:].view(b, s, horizon, -1)

    def _predict_next(self, z_BTD: torch.Tensor, action_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.predictor(z_BTD, action_BTD)
        return self.prediction_projector(x_BTD.flatten(0, 1)).view_as(x_BTD)

    def embed_and_predict(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings (B, T, D) of a window's frames, and predictions (B, T-1, D) of all but the first.

        The window's last action block is not used.
        """
        assert batch.pixels is not None
        z_BTD = self.encode(batch.pixels)
        actions_BTA = self.normalise_actions(batch.actions)
        return z_BTD, self.predict(z_BTD[:, :-1], actions_BTA[:, :-1])

    # -- training --------------------------------------------------------------------------------------------------

    def use_kernels(self, enabled: bool) -> None:
        """Whether the encoder takes kernels of our own where they fit."""
        self.encoder.use_kernels(enabled)

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        """A view whose encoder and predictor are compiled in parts."""
        fast = view(self)
        fast.encoder, fast.predictor = self.encoder.compiled(compile), view(self.predictor)
        fast.predictor.blocks = nn.ModuleList(compile(block) for block in self.predictor.blocks)
        return fast

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Set BatchNorm's statistics to those of ``batches``, in place. The model is left in evaluation mode.

        A step normalises by its own batch and keeps running averages for later, of batches that older weights have
        embedded. With a learning rate that is not yet small they describe a network that no longer is, and a
        checkpoint that uses them is much worse than the model in training.
        Dropout is as in training: the weights behind the second BatchNorm have been fitted to what it passes on.
        """
        self.eval()
        # Frames of one batch at a time: what is kept of them is small.
        with measuring(self.encoder):
            embedded = [(self.encoder(_frames(batch)), batch.actions) for batch in batches]
        set_statistics(self.projector, [frames_NW for frames_NW, _ in embedded])
        self.predictor.train()
        predictions = []
        for frames_NW, actions in embedded:
            z_BTD = self.projector(frames_NW).unflatten(0, actions.shape[:2])
            actions_BTA = self.normalise_actions(actions)
            x_BTD = self.predictor(z_BTD[:, :-1], self.action_embedder(actions_BTA[:, :-1]))
            predictions.append(x_BTD.flatten(0, 1))
        self.predictor.eval()
        set_statistics(self.prediction_projector, predictions)

    def remarks(self, frames: Array) -> list[str]:
        """What frames of the data, uint8 (N, R, R, 3), say against the encoder's settings."""
        return self.encoder.remarks(frames)

    # -- planning --------------------------------------------------------------------------------------------------

    def planning_rollout(self, precision: str = "auto", differentiable: bool = False) -> RolloutFunction:
        """``rollout`` for a planner, with a frozen copy of the weights: the same predictions for less work.

        precision: "float32", "bf16", or "auto": bf16 on CUDA.  differentiable: gradients with respect to the actions.
        """
        return choose_rollout(self, precision, differentiable)

    def planning_encoder(self, precision: str = "auto") -> EncoderFunction:
        """``encode`` for a planner, in a precision as for ``planning_rollout``, with a frozen copy of the weights."""
        frozen = copy.deepcopy(self).eval().requires_grad_(False)
        if planning_dtype(precision, self.device) == torch.float32:
            return frozen.encode
        # Products are bf16 as in training. Their weights are converted now, not at every call.
        frozen.use_kernels(False)  # they are for a training step's hundreds of frames
        for layer in [*frozen.encoder.heavy_layers(), frozen.projector.hidden, frozen.projector.out]:
            layer.to(torch.bfloat16)

        def encode(pixels: torch.Tensor) -> torch.Tensor:
            with torch.autocast(pixels.device.type, torch.bfloat16):
                return frozen.encode(pixels).float()

        return encode

    def rollout_flops(self, context: int, horizon: int) -> int:
        """Floating-point operations of ``rollout`` for one candidate, from so many frames over so many blocks."""
        return rollout_flops(self.settings, context, horizon)


def _frames(batch: Batch) -> torch.Tensor:
    """All frames of a batch, (B * T, R, R, 3)."""
    assert batch.pixels is not None
    return batch.pixels.flatten(0, 1)
