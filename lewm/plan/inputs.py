"""What plans start from: contexts and goals that are checked, encoded once, and put together into batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lewm.errors import PlanningError
from lewm.plan.capture import Captures
from lewm.types import Array, Context, WorldModel

T = TypeVar("T")
Place = tuple[int, int]  # of a plan: the number of its episode, and how many plans that had before
KEPT_GOALS = 1024  # whose embeddings are kept


@dataclass(frozen=True)
class Request:
    """One episode that wants a plan.

    goal: uint8 (R, R, 3).  key: its random stream.  horizon: blocks to plan, None: as configured.
    start: raw actions (n*K, action_dim) to begin the search from; a missing end is filled with mean actions.
    goal_proprio: what the agent senses of itself at the goal, (P,), for models that read it.
    place: which plan it is, for those who keep plans; it changes nothing about it.
    """

    context: Context
    goal: Array
    key: int = 0
    horizon: int | None = None
    start: Array | None = None
    place: Place = (0, 0)
    goal_proprio: Array | None = None


class Encoded(NamedTuple):
    """Requests as a search takes them: embeddings of frames, z-scored blocks between them, embeddings of goals.

    keys, start_BHA: of as many searches as there are episodes, or of several times as many (see ``soonest.py``).
    """

    z_BTD: torch.Tensor
    past_BTA: torch.Tensor
    goal_BD: torch.Tensor
    keys: torch.Tensor
    start_BHA: torch.Tensor


class InputEncoder:
    """Checks and encodes what plans start from."""

    def __init__(self, model: WorldModel, precision: str, capture: Captures) -> None:
        self.model, self.block_dim = model, model.frame_skip * model.action_dim
        self.proprio_dim: int = getattr(model, "proprio_dim", 0)
        self._encoder, self._capture = model.planning_encoder(precision), capture
        self._goals: dict[bytes, tuple[Array, torch.Tensor]] = {}

    def encode(self, requests: Sequence[Request], horizon: int) -> Encoded:
        """Requests of one context length, to be planned ``horizon`` blocks ahead."""
        z_BTD, past_BTA = self._contexts([request.context for request in requests])
        goal_BD = self.goals([request.goal for request in requests], [request.goal_proprio for request in requests])
        keys_B = torch.tensor([request.key for request in requests], dtype=torch.int64, device=self.model.device)
        start_BHA = torch.stack([self._start(request, horizon) for request in requests])
        return Encoded(z_BTD, past_BTA, goal_BD, keys_B, start_BHA)

    def goals(self, goals: Sequence[Array], proprio: Sequence[Array | None] | None = None) -> torch.Tensor:
        """Goal images, and what is sensed there -> embeddings (B, D).

        Each is encoded once: an episode asks with the same one every time.
        """
        if len(self._goals) > KEPT_GOALS:
            self._goals.clear()
        return torch.stack([self._goal(*each) for each in zip(goals, proprio or [None] * len(goals), strict=True)])

    def blank(self) -> torch.Tensor:
        """The embedding (1, 1, D) of a black frame."""
        size, nothing = self.model.image_size, torch.zeros(1, 1, self.proprio_dim)
        (z_BTD,) = self._embed(torch.zeros(1, 1, size, size, 3, dtype=torch.uint8), nothing)
        return z_BTD.detach()

    def _contexts(self, contexts: Sequence[Context]) -> tuple[torch.Tensor, torch.Tensor]:
        """Contexts of one length T -> embeddings (B, T, D) and z-scored blocks between them (B, T-1, A)."""
        model, length = self.model, len(contexts[0].frames)
        if not 1 <= length <= model.history:
            raise PlanningError(f"A plan starts from 1 to {model.history} frames, got {length}.")
        z_BTD = self._images(np.stack([c.frames for c in contexts]), [c.proprio for c in contexts], "frames", (length,))
        expected = (length - 1, model.frame_skip, model.action_dim)
        for context in contexts:
            if length > 1 and context.executed.shape != expected:
                raise PlanningError(
                    f"{length} frames need executed actions of shape {expected}, got {context.executed.shape}."
                )
        if length == 1:
            return z_BTD, z_BTD.new_zeros(len(contexts), 0, self.block_dim)
        return z_BTD, self.normalised(np.stack([c.executed for c in contexts]))

    def _goal(self, goal: Array, proprio: Array | None) -> torch.Tensor:
        # Every 16th row finds a goal again quickly; all pixels then decide whether it is the same.
        name = goal[::16].tobytes() + (b"" if proprio is None else proprio.tobytes())
        known = self._goals.get(name)
        if known is None or not np.array_equal(known[0], goal):
            known = self._goals[name] = goal.copy(), self._images(goal[None], [proprio], "goal", ())[0]
        return known[1]

    def _images(
        self, pixels: Array, proprio: Sequence[Array | None], what: str, leading: tuple[int, ...]
    ) -> torch.Tensor:
        """Images (B, *leading, R, R, 3), and B times the proprioception (*leading, P) with them -> embeddings."""
        size = self.model.image_size
        if pixels.dtype != np.uint8 or pixels.shape[1 + len(leading) :] != (size, size, 3):
            raise PlanningError(
                f"The {what} must be uint8 images of {size} x {size} x 3, as the model was trained on; got "
                f"{pixels.dtype} of shape {pixels.shape[1:]}. Render or resize to {size} pixels."
            )
        sensed = torch.from_numpy(np.stack([self._sensed(numbers, what, leading) for numbers in proprio]))
        (z,) = self._capture("encode", self._embed, torch.from_numpy(pixels), sensed)
        return z.clone()

    def _sensed(self, proprio: Array | None, what: str, leading: tuple[int, ...]) -> Array:
        """The proprioception with some images, float32 (*leading, P); P is 0 of a model that reads none."""
        shape = (*leading, self.proprio_dim)
        return checked_proprio(proprio, shape, what) if self.proprio_dim else np.zeros(shape, np.float32)

    def _embed(self, pixels: torch.Tensor, proprio: torch.Tensor) -> tuple[torch.Tensor]:
        seen = (pixels, proprio) if self.proprio_dim else (pixels,)
        return (self._encoder(*(tensor.to(self.model.device) for tensor in seen)),)

    def _start(self, request: Request, horizon: int) -> torch.Tensor:
        """Where a request's search begins, z-scored (H, A)."""
        start = torch.zeros(horizon, self.block_dim, device=self.model.device)
        if request.start is not None:
            blocks = request.start.reshape(-1, self.model.frame_skip, self.model.action_dim)[:horizon]
            start[: len(blocks)] = self.normalised(blocks)
        return start

    def normalised(self, raw: Array) -> torch.Tensor:
        """Raw actions (..., K, action_dim) -> z-scored blocks (..., A) on the model's device."""
        return self.model.normalise_actions(torch.from_numpy(raw).to(self.model.device, torch.float32))


def checked_proprio(proprio: Array | None, shape: tuple[int, ...], what: str) -> Array:
    """What an agent senses of itself with some images, as a copy in float32, if it has the shape."""
    if proprio is None or np.shape(proprio) != shape:
        got = "none" if proprio is None else f"shape {np.shape(proprio)}"
        raise PlanningError(
            f"This model reads what the agent senses of itself, {shape[-1]} numbers with each image. Give it as "
            f"`proprio` with the {what}: expected shape {shape}, got {got}."
        )
    return np.array(proprio, np.float32)


# -- batches ---------------------------------------------------------------------------------------------------------


def largest_batch(device: torch.device, most: int) -> int:
    """How many episodes are decided upon together at most.

    On a CPU one: its candidates fill the cores already, and products of a fixed shape round the same way whatever else
    is being decided.
    """
    return 1 if device.type == "cpu" else most


def grouped(kinds: Sequence[Hashable], size: int) -> list[list[int]]:
    """The places of equal kinds, in groups of at most ``size``."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        groups[kind].append(index)
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


def padded(batch: Sequence[T], device: torch.device, most: int) -> Sequence[T]:
    """On CUDA, repeat the last one up to a rounder number: few shapes, so few graphs to capture."""
    if device.type != "cuda":
        return batch
    return [*batch, *[batch[-1]] * (round_size(len(batch), most) - len(batch))]


def round_size(count: int, most: int) -> int:
    """The next rounder number, four of them between powers of two; above ``most`` only if ``count`` is."""
    grain = 1 << max(0, (count - 1).bit_length() - 3)
    return min(-(-count // grain) * grain, max(most, count))
