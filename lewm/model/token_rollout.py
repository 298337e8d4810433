"""Imagining with a ``TokenPredictor``: its own predictions, for less work and in bounded memory.

- While the window grows, keys and values of its frames are kept, and a new frame's tokens attend to them. Once it
  slides, every frame has a new position, and is computed afresh.
- Real frames whose actions are executed already are the same for all candidates, and are computed once.
- Only the last frame of a window is followed through the last layer.
- Candidates come in parts of bounded memory. Of a predicted frame only its distance to the goal is kept, where that is
  all that is asked for.

Shapes as in ``token_predictor``; D = N * F is a frame's flattened tokens, M = B * S the candidates of all episodes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lewm.kernels import token_layers
from lewm.kernels.rollout import planning_dtype
from lewm.kernels.rollout_window import walk
from lewm.model.token_predictor import TokenPredictor, attend

# What the candidates of a part may take. More would not be faster: each of their products fills a GPU.
PART_BYTES, PART_BYTES_OF_A_CPU = 4 << 30, 1 << 28
SHARE_OF_FREE = 16  # on CUDA at most this part of what is free: a captured search keeps its own
# From the fastest for a few hundred tokens of 64 to the one that takes anything.
ATTENTION_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
GRAIN = 8  # rows of bfloat16 are to begin on multiples of 16 bytes
STEPS_OF_A_GRADIENT = 3  # windows' worth of every layer that a gradient through a plan of usual length remembers


class TokenRollout:
    """Rolls out candidate plans with a frozen copy of a predictor's weights.

    Args:
        predictor: as trained; its device is the rollout's.
        precision: of the products, as ``planning_dtype`` has it; all between them is float32.
        differentiable: whether distances have gradients with respect to the actions.
        shares: what each of a token's F numbers counts for in a distance, None: all alike, 1 / F.
        plain: whether the predictor's own layers are taken also where there are faster ones.
    """

    def __init__(
        self,
        predictor: TokenPredictor,
        precision: str = "auto",
        differentiable: bool = False,
        shares: Sequence[float] | None = None,
        plain: bool = False,
    ) -> None:
        device, depth = predictor.positions.device, len(predictor.blocks)
        dtype = planning_dtype(precision, device)
        size = _candidate_bytes(predictor, dtype) * (STEPS_OF_A_GRADIENT * depth if differentiable else 1)
        self._most, self._differentiable = max(1, part_bytes(device) // size), differentiable
        self._shares_F = torch.tensor(shares or [1 / predictor.features] * predictor.features, device=device)
        self._predictor = copy.deepcopy(predictor).eval().requires_grad_(False)
        self._layers: Callable[[torch.Tensor, list[torch.Tensor | None], bool], torch.Tensor] = self._plain_layers
        if not (plain or differentiable) and token_layers.worthwhile(device, dtype):
            self._layers = token_layers.TokenLayers(self._predictor.blocks, attend, dtype)
        else:
            for block in self._predictor.blocks:
                _replace_linears(block, dtype)

    def predictions(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """Predicted frames (B, S, H, D). Arguments as for ``RolloutFunction``."""

        def kept(z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
            frames = [frame_BSNF.flatten(2) for frame_BSNF in self._imagine(z_BTD, past_BTA, actions_BSHA)]
            return torch.stack(frames, dim=2)

        return self._in_parts(kept, actions_BSHA, z_BTD, past_BTA)

    def distances(
        self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor, goal_BD: torch.Tensor
    ) -> torch.Tensor:
        """Squared differences between the tokens of predicted frames and a goal's, weighted means, (B, S, H)."""

        def measured(
            z_BTD: torch.Tensor, past_BTA: torch.Tensor, goal_BD: torch.Tensor, actions_BSHA: torch.Tensor
        ) -> torch.Tensor:
            goal_B1NF = goal_BD.unflatten(-1, (-1, len(self._shares_F))).unsqueeze(1)
            frames = self._imagine(z_BTD, past_BTA, actions_BSHA)
            return torch.stack([(f - goal_B1NF).square().mean(2) @ self._shares_F for f in frames], dim=2)

        def part(*tensors: torch.Tensor) -> torch.Tensor:
            if not self._differentiable:
                return measured(*tensors)
            # What a gradient needs of all parts at once would not fit: it is computed again.
            return checkpoint(measured, *tensors, use_reentrant=False, preserve_rng_state=False)

        return self._in_parts(part, actions_BSHA, z_BTD, past_BTA, goal_BD)

    def _in_parts(
        self, function: Callable[..., torch.Tensor], actions_BSHA: torch.Tensor, *per_episode: torch.Tensor
    ) -> torch.Tensor:
        """``function(*per_episode, actions)`` for all candidates (B, S, ...), some at a time."""
        samples = actions_BSHA.shape[1]
        parts = -(-samples // self._most)
        episodes, size = max(1, self._most // samples), -(-samples // parts)
        rows = []
        with self._attention():
            for some, *theirs in zip(*(t.split(episodes) for t in (actions_BSHA, *per_episode)), strict=True):
                rows.append(torch.cat([function(*theirs, part) for part in some.split(size, dim=1)], dim=1))
        return torch.cat(rows)

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        """Which kernels to prefer. What is computed again for a gradient must be by the same: there, the usual ones."""
        choose = self._predictor.positions.is_cuda and not self._differentiable
        return sdpa_kernel(ATTENTION_KERNELS, set_priority=True) if choose else contextlib.nullcontext()

    def _imagine(
        self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """The frame (B, S, N, F) after each block of candidates."""
        predictor, (episodes, samples, horizon, _) = self._predictor, actions_BSHA.shape
        real_BTNF = z_BTD.float().unflatten(-1, (-1, predictor.features))
        context = z_BTD.shape[1]
        last_real = context - 1  # the first frame of a candidate's own: the plan's first block acts on it
        executed_BTE, planned_MHE = (predictor.action_embedder(a) for a in (past_BTA, actions_BSHA.flatten(0, 1)))
        frames_MNF = [real_BTNF[:, -1].repeat_interleave(samples, 0)]
        seen: list[torch.Tensor | None]
        for step in walk(context, horizon, predictor.frames):
            if step.begins:
                seen = [None] * len(predictor.blocks)
            if step.shared:
                new = slice(step.shared.start, step.shared.stop)
                self._extend(real_BTNF[:, new], executed_BTE[:, new], new.start - step.start, seen, keep=True)
                seen = [None if each is None else each.repeat_interleave(samples, 0) for each in seen]
            own = slice(step.own.start - last_real, step.own.stop - last_real)
            window_MTNF = torch.stack(frames_MNF[own], dim=1)
            slot = step.own.start - step.start
            frame_MNF = self._extend(window_MTNF, planned_MHE[:, own], slot, seen, keep=step.grows)
            frames_MNF.append(frame_MNF)
            yield frame_MNF.unflatten(0, (episodes, samples))

    def _extend(
        self, z_MTNF: torch.Tensor, action_MTE: torch.Tensor, slot: int, seen: list[torch.Tensor | None], keep: bool
    ) -> torch.Tensor:
        """Send new frames of a window through all layers: the frame (M, N, F) that the last one predicts.

        seen: keys and values of each layer so far, (M, tokens, 2, h, w); with ``keep``, those of the new ones join.
        """
        x_MTNW = self._layers(self._predictor.place(z_MTNF, action_MTE, slot), seen, keep)
        return self._predictor.read(x_MTNW)[:, -1]

    def _plain_layers(self, x_MTNW: torch.Tensor, seen: list[torch.Tensor | None], keep: bool) -> torch.Tensor:
        """The last frame behind all layers, (M, 1, N, W)."""
        frames, last = x_MTNW.shape[1], len(seen) - 1
        for number, block in enumerate(self._predictor.layers()):
            x_MTNW, known = block.extend(x_MTNW, seen[number], 1 if number == last else frames)
            seen[number] = known if keep else None
        return x_MTNW


class _Product(nn.Module):
    """A linear layer in another type, whose weights have the sizes that fast products want; its answers are as wide."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.odd = linear.out_features, -linear.in_features % GRAIN
        odd = -self.width % GRAIN
        self.register_buffer("weight", F.pad(linear.weight.detach(), (0, self.odd, 0, odd)).to(dtype))
        bias = linear.bias
        self.register_buffer("bias", None if bias is None else F.pad(bias.detach(), (0, odd)).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.odd:
            even = x.new_zeros((*x.shape[:-1], self.weight.shape[1]), dtype=self.weight.dtype)
            even[..., : -self.odd] = x
            x = even
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)[..., : self.width]


def _replace_linears(module: nn.Module, dtype: torch.dtype) -> None:
    """Exchange every linear layer inside."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _Product(child, dtype))
        else:
            _replace_linears(child, dtype)


def part_bytes(device: torch.device) -> int:
    """Memory for the candidates that are imagined at once; to be asked before anything is captured."""
    if device.type != "cuda":
        return PART_BYTES_OF_A_CPU
    free, _ = torch.cuda.mem_get_info(device)
    return min(PART_BYTES, free // SHARE_OF_FREE)


def _candidate_bytes(predictor: TokenPredictor, dtype: torch.dtype) -> int:
    """About what a candidate takes: keys and values of its window in all layers, and what one layer computes."""
    _, frames, tokens, width = predictor.positions.shape
    config = predictor.config
    inner = config.heads * config.head_width
    numbers = 2 * config.depth * inner + 5 * inner + 2 * config.mlp_width
    return frames * tokens * (numbers * dtype.itemsize + 16 * width)
