"""What a model expects to see next: the prediction of one block ahead from real frames, beside what then is seen.

    error of frame t:  ‖z_t − ẑ_t‖²,  ẑ_t = pred(z_{t-H}, ..., z_{t-1}; the actions that were executed there)

H is the model's history, and frames lie a block of K environment steps apart. The model's context is real at every
step: a surprise is never carried on. Errors are heavy-tailed, so that their logarithms are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from lewm.errors import ConfigError
from lewm.frames import resized
from lewm.methods.base import Method
from lewm.model.jepa import JEPA
from lewm.types import Array, WorldModel

# Windows of embeddings (M, T, D) and z-scored blocks (M, T, A) -> the embeddings after them, (M, D).
Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# What processors call their bf16 products; torch computes it without them as well, but more slowly than float32.
_NATIVE = ("avx512_bf16", "amx_bf16")
FRAMES_AT_ONCE = 32  # are embedded together; more do not make a CPU faster


class Foresight:
    """A world model's eyes, and its expectations.

    precision: of the eyes, "float32" or "bf16", which some processors compute faster; expectations are float32.

    Shapes: N frames of an episode, D numbers of an embedding (of tokens: all of them), M windows of T = ``history``
    frames, K steps in a block.
    """

    def __init__(self, model: Method, precision: str = "float32") -> None:
        name = model.settings.NAME
        if not (hasattr(model, "planning_encoder") and hasattr(model, "planning_rollout")):
            raise ConfigError(f"The method {name!r} predicts no frames, so nothing surprises it. Take a world model.")
        if model.proprio_dim:
            problem = "reads what the agent senses of itself, which is not given here"
            raise ConfigError(f"This model of the method {name!r} {problem}. Take one that was trained without.")
        if model.training:  # BatchNorm and dropout would make every answer another
            raise ConfigError("The model is in training mode. Call model.eval() first, or take it from lewm.load.")
        self.history, self.frame_skip, self.action_dim = model.history, model.frame_skip, model.action_dim
        self.image_size, self.device = model.image_size, model.device
        self._normalise = model.normalise_actions
        self._encode = cast(WorldModel, model).planning_encoder(precision)
        self._predict = _one_block_ahead(model)

    @torch.inference_mode()
    def embed(self, frames: Array) -> torch.Tensor:
        """Embeddings (N, D) of frames uint8 (N, S, S, 3) of any size S."""
        fitted = resized(frames, self.image_size)
        parts = (fitted[first : first + FRAMES_AT_ONCE] for first in range(0, len(fitted), FRAMES_AT_ONCE))
        return torch.cat([self._encode(torch.from_numpy(part).to(self.device)) for part in parts])

    @torch.inference_mode()
    def expected(self, z_MTD: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The embeddings (M, D) after windows of real frames and raw actions (M, T, K, action_dim) executed there."""
        blocks_MTA = self._normalise(blocks)
        return self._predict(z_MTD, blocks_MTA)

    @torch.inference_mode()
    def errors(self, z_ND: torch.Tensor, actions: Array, every: int) -> Array:
        """Squared errors float64 (N - first,) of the frames from number ``first`` on, see ``first_expected``.

        z_ND: of frames that lie ``every`` steps apart.  actions: raw (L, action_dim), from the first frame on.
        """
        first, apart = first_expected(self.history, self.frame_skip, every), self.frame_skip // every
        count = len(z_ND) - first
        if count <= 0:
            return np.zeros(0)
        begins = np.arange(count)[:, None] + apart * np.arange(self.history)  # (M, T): the frames of each window
        blocks = torch.from_numpy(
            np.asarray(actions, np.float32)[begins[..., None] * every + np.arange(self.frame_skip)]
        )
        expected = self.expected(z_ND[torch.from_numpy(begins).to(self.device)], blocks.to(self.device))
        return squared_distance(expected, z_ND[first:])

    def frames_needed(self, every: int) -> int:
        """How many frames an episode needs at least for one error."""
        return first_expected(self.history, self.frame_skip, every) + 1


def fastest_precision(device: torch.device) -> str:
    """ "bf16" on CUDA and on processors that multiply it natively, else "float32"."""
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    return "bf16" if device.type == "cuda" or any(known.get(name) for name in _NATIVE) else "float32"


def _one_block_ahead(model: Method) -> Predict:
    """A JEPA's own prediction; of others a rollout of one block, which is made for many futures of many blocks."""
    if isinstance(model, JEPA):
        return lambda z_MTD, blocks_MTA: model.predict(z_MTD, blocks_MTA)[:, -1]
    rollout = cast(WorldModel, model).planning_rollout("float32", False)
    return lambda z_MTD, blocks_MTA: rollout(z_MTD, blocks_MTA[:, :-1], blocks_MTA[:, None, -1:])[:, 0, 0]


def first_expected(history: int, frame_skip: int, every: int) -> int:
    """The number of the first frame that is expected from a full history, of frames ``every`` steps apart."""
    if every < 1 or frame_skip % every:
        raise ConfigError(
            f"every must divide the model's block of {frame_skip} steps, got {every}. Take 1 or {frame_skip}."
        )
    return history * (frame_skip // every)


def squared_distance(first_ND: torch.Tensor, second_ND: torch.Tensor) -> Array:
    """‖a − b‖² over the numbers of each of N embeddings, float64 (N,)."""
    distance: Array = (first_ND - second_ND).square().sum(-1).cpu().numpy().astype(np.float64)
    return distance
