"""The rollout of a world model, arranged for planning: the numbers of ``LeWM.rollout`` for less work.

A planner rolls out hundreds of candidates from one context, over and over. Compared with calling the predictor on
every window, this code

- keeps keys and values while the window only grows: causal tokens do not change when one is added behind them. Once the
  window slides, every token has a new position and is computed afresh;
- computes tokens that all candidates share (real frames and executed actions) once, not once per candidate;
- evaluates each action's modulation once, though its token appears in up to ``history`` windows;
- follows only the last token through the last layer, where nothing else is read;
- writes attention over a handful of tokens out as products that fuse, instead of calling a kernel built for thousands.

Shapes as in ``lewm.types``; additionally n new tokens, m tokens they attend to, h heads, w their width. The candidates'
axis S has size 1 where a token is shared by all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import nn

from lewm.errors import PlanningError

if TYPE_CHECKING:
    from lewm.model.predictor import AdaLNBlock
    from lewm.model.world_model import LeWM, Projector

# Keys and values (B, S or 1, m, h, w) of one group of tokens.
_KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Window:
    """What is known of the current window: its first token, and each layer's keys and values so far."""

    start: int
    layers: list[list[_KeysValues]] = field(default_factory=list)


class FastRollout:
    """Rolls out candidate plans with a frozen copy of a model's weights.

    Args:
        model: the model, in evaluation mode.
        dtype: of the arithmetic; float32 gives the model's own predictions to rounding.
    """

    def __init__(self, model: LeWM, dtype: torch.dtype = torch.float32) -> None:
        if model.training:
            raise PlanningError("A rollout needs the model in evaluation mode. Call model.eval() first.")
        self.history = model.history
        self.dtype = dtype
        blocks = cast("list[AdaLNBlock]", list(model.predictor.blocks))
        embedder = model.action_embedder
        with torch.no_grad():
            self._embed_action = [_affine(part, dtype) for part in (embedder.reduce, embedder.mlp[0], embedder.mlp[2])]
            # All layers' modulations come from one product.
            modulations = [_affine(block.modulation[1], dtype) for block in blocks]
            self._modulation = tuple(torch.cat(tensors) for tensors in zip(*modulations, strict=True))
            self._layers = [_Layer(block, dtype) for block in blocks]
            self._positions = model.predictor.positions[0].detach().to(dtype, copy=True)
            self._norm = _affine(model.predictor.norm, dtype)
            self._project = _fold_batch_norm(model.prediction_projector, dtype)

    def __call__(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """Predictions (B, S, H, D) in float32; arguments as for ``LeWM.rollout``."""
        context, horizon = z_BTD.shape[1], actions_BSHA.shape[2]
        z = [z_BTD[:, None, t].to(self.dtype) for t in range(context)]
        shared, own = self._modulate(past_BTA.unsqueeze(1)), self._modulate(actions_BSHA)
        window: _Window | None = None
        fresh = 0
        for end in range(context, context + horizon):
            start = max(0, end - self.history)
            if window is None or window.start != start:
                window, fresh = _Window(start, [[] for _ in self._layers]), start
            shared_end = min(end, context - 1)
            if fresh < shared_end:
                self._advance(window, z, shared[:, :, fresh:shared_end], shared_end, read_last=False)
            first_own = max(fresh, shared_end) - shared_end
            z.append(self._advance(window, z, own[:, :, first_own : end - shared_end], end, read_last=True))
            fresh = end
        return torch.stack(z[context:], dim=2).float()

    def _modulate(self, actions: torch.Tensor) -> torch.Tensor:
        """Action blocks (B, S, n, A) -> all layers' shifts, scales and gates (B, S, n, layers*6*D)."""
        reduce, hidden, out = self._embed_action
        embedded = F.linear(F.silu(F.linear(F.linear(actions.to(self.dtype), *reduce), *hidden)), *out)
        return F.linear(F.silu(embedded), *self._modulation)

    def _advance(
        self, window: _Window, z: list[torch.Tensor], modulation: torch.Tensor, end: int, read_last: bool
    ) -> torch.Tensor:
        """Send the tokens before ``end``, as many as have a modulation, through all layers.

        Returns the prediction of the last one (B, S, D). With ``read_last`` False only keys and values are kept, and
        the result means nothing.
        """
        tokens = [z[i] + self._positions[i - window.start] for i in range(end - modulation.shape[2], end)]
        x = torch.stack(torch.broadcast_tensors(*tokens), dim=2)
        per_layer = modulation.unflatten(-1, (len(self._layers), 6, -1)).unbind(-3)
        for depth, layer in enumerate(self._layers):
            last_layer = depth == len(self._layers) - 1
            outputs = x.shape[2] if not last_layer else int(read_last)
            x = layer(x, per_layer[depth], window.layers[depth], outputs)
        return self._predict(x[:, :, -1]) if read_last else x

    def _predict(self, x: torch.Tensor) -> torch.Tensor:
        """A last-layer token (B, S, D) -> the embedding it predicts."""
        hidden, out = self._project
        x = F.layer_norm(x, x.shape[-1:], *self._norm)
        return F.linear(F.gelu(F.linear(x, *hidden)), *out)


class _Layer:
    """One AdaLN block with its weights in the arithmetic's type."""

    def __init__(self, block: AdaLNBlock, dtype: torch.dtype) -> None:
        attention, mlp = block.attention, block.mlp
        self.heads = attention.heads
        self.attention_norm = _affine(attention.norm, dtype)
        self.qkv = attention.qkv.weight.detach().to(dtype, copy=True)
        self.out = _affine(attention.out, dtype)
        self.mlp_norm, self.hidden, self.mlp_out = (_affine(mlp[i], dtype) for i in (0, 1, 4))

    def __call__(self, x: torch.Tensor, mod: torch.Tensor, seen: list[_KeysValues], outputs: int) -> torch.Tensor:
        """Tokens (B, S, n, D), their modulation (B, S, n, 6, D) -> the last ``outputs`` of them, updated.

        ``seen`` holds earlier tokens' keys and values; these tokens' own are appended to it.
        """
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = mod.unbind(-2)
        normed = _modulated_norm(x, shift_a, scale_a, self.attention_norm)
        inner, n = self.qkv.shape[0] // 3, x.shape[2]
        # A token that sees only itself takes its own value: no query is needed.
        alone = n == 1 and not seen
        if outputs == n and not alone:
            q, k, v = _linear(normed, self.qkv).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        else:
            k, v = _linear(normed, self.qkv[inner:]).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        seen.append((k, v))
        if outputs == 0:
            return x
        if outputs < n:
            q = _linear(normed[:, :, n - outputs :], self.qkv[:inner]).unflatten(-1, (self.heads, -1))
        x, gate_a, shift_m, scale_m, gate_m = (t[:, :, n - outputs :] for t in (x, gate_a, shift_m, scale_m, gate_m))
        attended = v if alone else _attend(q, seen)
        x = x + gate_a * _linear(attended.flatten(-2), *self.out)
        normed = _modulated_norm(x, shift_m, scale_m, self.mlp_norm)
        return x + gate_m * _linear(F.gelu(_linear(normed, *self.hidden)), *self.mlp_out)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` as one product of two matrices; with strides between tokens it would make one for each."""
    return F.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _modulated_norm(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, affine: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """AdaLN's modulation, and the second LayerNorm that the released network has behind it."""
    x = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
    return F.layer_norm(x, x.shape[-1:], *affine)


def _attend(q: torch.Tensor, seen: list[_KeysValues]) -> torch.Tensor:
    """Queries (B, S, n, h, w) of the newest tokens over all tokens seen -> (B, S, n, h, w).

    The last group seen is the queries' own, so each query sees one token more than the one before it.
    """
    q = q * q.shape[-1] ** -0.5
    n, own = q.shape[2], seen[-1][0].shape[2]
    answers = []
    for i in range(n):
        keys, values = seen[-1][0][:, :, : own - n + 1 + i], seen[-1][1][:, :, : own - n + 1 + i]
        answers.append(_attend_one(q[:, :, i : i + 1], [*seen[:-1], (keys, values)]))
    return torch.cat(answers, dim=2) if n > 1 else answers[0]


def _attend_one(q: torch.Tensor, seen: list[_KeysValues]) -> torch.Tensor:
    """One query (B, S, 1, h, w) over tokens in groups of m -> (B, S, 1, h, w)."""
    weights = torch.cat([(q * k).sum(-1) for k, _ in seen], dim=2).softmax(dim=2)
    parts = weights.unsqueeze(-1).split([k.shape[2] for k, _ in seen], dim=2)
    return torch.stack([(w * v).sum(2, keepdim=True) for w, (_, v) in zip(parts, seen, strict=True)]).sum(0)


def _affine(layer: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a linear or normalisation layer, detached."""
    weight, bias = cast("tuple[torch.Tensor, torch.Tensor]", (layer.weight, layer.bias))
    return weight.detach().to(dtype, copy=True), bias.detach().to(dtype, copy=True)


def _fold_batch_norm(projector: Projector, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A projector's two linear layers, with its BatchNorm's fixed statistics folded into the first."""
    norm = cast("nn.BatchNorm1d", projector[1])
    mean, variance = cast("tuple[torch.Tensor, torch.Tensor]", (norm.running_mean, norm.running_var))
    weight, bias = _affine(projector[0], torch.float32)
    gain = norm.weight.detach() * (variance + norm.eps).rsqrt()
    folded = weight * gain.unsqueeze(1), (bias - mean) * gain + norm.bias.detach()
    return [(folded[0].to(dtype), folded[1].to(dtype)), _affine(projector[3], dtype)]
