"""The rollout of a world model, arranged for planning: the numbers of ``JEPA.rollout`` for less work.

A planner rolls out hundreds of candidates from one context, over and over. Compared with calling the predictor on
every window, this code

- keeps keys and values while the window only grows: causal tokens do not change when one is added behind them. Once the
  window slides, every token has a new position and is computed afresh;
- computes tokens that all candidates share (real frames and executed actions) once, not once per candidate;
- evaluates each action's modulation once, though its token appears in up to ``history`` windows;
- follows only the last token through the last layer, where nothing else is read;
- spares a window's first token its query, key and value. A softmax does not change when all its scores are shifted,
  and its weights sum to one: keys and values can be counted from the first token's. Then its score is zero, and its
  part of every answer is one narrow product, the values' and the output's weights multiplied beforehand;
- folds what is constant into weights: the norms' affine parts, BatchNorm, the attention's scale, the one of 1 + scale;
- writes attention over a handful of tokens out as products that fuse, instead of calling a kernel built for thousands.

Shapes as in ``lewm.types``; additionally n new tokens, h heads, w their width. Tokens come first, (n, B, S, D), so that
those of a window lie together in memory. The candidates' axis S has size 1 where a token is shared by all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import nn

from lewm.errors import PlanningError

if TYPE_CHECKING:
    from lewm.model.jepa import JEPA
    from lewm.model.predictor import AdaLNBlock
    from lewm.model.projector import Projector

_Affine = tuple[torch.Tensor, torch.Tensor]  # weight and bias
_KeyValue = tuple[torch.Tensor, torch.Tensor]  # of one token (B, S or 1, h, w)


@dataclass
class _Seen:
    """What a layer's attention remembers of a window.

    first: the first token as attention reads it and what attention makes of it, (1, B, S or 1, D) each.
    later: key and value of each later token, less the first token's.
    """

    first: tuple[torch.Tensor, torch.Tensor] | None = None
    later: list[_KeyValue] = field(default_factory=list)


class FastRollout:
    """Rolls out candidate plans with a frozen copy of a model's weights.

    Args:
        model: the model, in evaluation mode.
        dtype: of the arithmetic; float32 gives the model's own predictions to rounding.
    """

    def __init__(self, model: JEPA, dtype: torch.dtype = torch.float32) -> None:
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
            # Subclasses' kernels take the scales as they are.
            self._modulation_bias = _add_one_to_scales(self._modulation[1], len(blocks))
            self._layers = [_Layer(block, dtype) for block in blocks]
            self._positions = model.predictor.positions[0].detach().to(dtype, copy=True)
            hidden, out = _fold_batch_norm(model.prediction_projector, torch.float32)
            self._project = _cast(_fold_norm(model.predictor.norm, *hidden), dtype), _cast(out, dtype)

    def __call__(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """Predictions (B, S, H, D) in float32; arguments as for ``JEPA.rollout``."""
        context, horizon = z_BTD.shape[1], actions_BSHA.shape[2]
        z = [z_BTD[:, t, None].to(self.dtype) for t in range(context)]
        shared, own = self._modulate(past_BTA.transpose(0, 1).unsqueeze(2)), self._modulate(actions_BSHA.movedim(2, 0))
        window: list[_Seen] = []
        window_start, fresh = -1, 0
        for end in range(context, context + horizon):
            start = max(0, end - self.history)
            if window_start != start:
                window, window_start, fresh = [_Seen() for _ in self._layers], start, start
            shared_end = min(end, context - 1)
            if fresh < shared_end:
                tokens = self._place(z[fresh:shared_end], fresh - start)
                self._advance(window, tokens, shared[fresh:shared_end], read_last=False)
            first_own = max(fresh, shared_end)
            tokens = self._place(z[first_own:end], first_own - start)
            z.append(self._advance(window, tokens, own[first_own - shared_end : end - shared_end], read_last=True))
            fresh = end
        return torch.stack(z[context:], dim=2).float()

    def _modulate(self, actions: torch.Tensor) -> torch.Tensor:
        """Action blocks (n, B, S, A) -> all layers' shifts, 1 + scales and gates (n, B, S, layers*6*D)."""
        reduce, hidden, out = self._embed_action
        embedded = F.linear(F.silu(F.linear(F.linear(actions.to(self.dtype), *reduce), *hidden)), *out)
        return F.linear(F.silu(embedded), self._modulation[0], self._modulation_bias)

    def _place(self, z: list[torch.Tensor], position: int) -> torch.Tensor:
        """Embeddings (B, S or 1, D) of n tokens that stand in a window from ``position`` on -> (n, B, S or 1, D)."""
        return torch.stack(torch.broadcast_tensors(*z)) + self._positions[position : position + len(z), None, None]

    def _advance(self, window: list[_Seen], x: torch.Tensor, modulation: torch.Tensor, read_last: bool) -> torch.Tensor:
        """Send new tokens (n, B, S or 1, D) through all layers; ``modulation`` (n, B, S, layers*6*D).

        Returns the prediction of the last one (B, S, D). With ``read_last`` False, the window remembers the tokens and
        the result means nothing.
        """
        per_layer = modulation.unflatten(-1, (len(self._layers), 6, -1)).unbind(-3)
        for layer, mod, seen in zip(self._layers, per_layer, window, strict=True):
            outputs = len(x) if layer is not self._layers[-1] else int(read_last)
            x = layer(x, mod, seen, outputs)
        return self._predict(x[-1]) if read_last else x

    def _predict(self, x: torch.Tensor) -> torch.Tensor:
        """A last-layer token (B, S, D) -> the embedding it predicts."""
        hidden, out = self._project
        return _linear(F.gelu(_linear(F.layer_norm(x, x.shape[-1:]), *hidden)), *out)


class _Layer:
    """One AdaLN block with its weights in the arithmetic's type."""

    def __init__(self, block: AdaLNBlock, dtype: torch.dtype) -> None:
        attention, mlp = block.attention, block.mlp
        self.heads = attention.heads
        no_bias = attention.qkv.weight.new_zeros(attention.qkv.weight.shape[0])
        weight, bias = _fold_norm(attention.norm, attention.qkv.weight, no_bias)
        (query, _, value), (query_bias, _, value_bias) = weight.chunk(3), bias.chunk(3)
        scale = attention.head_width**-0.5
        out_weight, out_bias = _affine(attention.out, torch.float32)
        self.query = _cast((query * scale, query_bias * scale), dtype)
        # Of these, only differences between tokens are asked for: a bias would cancel.
        self.keys_values = weight[len(query) :].to(dtype)
        self.out = out_weight.to(dtype)
        self.alone = _cast((out_weight @ value, out_weight @ value_bias + out_bias), dtype)
        self.hidden = _cast(_fold_norm(mlp[0], *_affine(mlp[1], torch.float32)), dtype)
        self.mlp_out = _affine(mlp[4], dtype)

    def __call__(self, x: torch.Tensor, mod: torch.Tensor, seen: _Seen, outputs: int) -> torch.Tensor:
        """Tokens (n, B, S or 1, D), their modulation (n, B, S, 6, D) -> the last ``outputs`` of them, updated."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = mod.unbind(-2)
        attended = self._attend(_modulated_norm(x, shift_a, scale_a), seen, outputs)
        if outputs == 0:
            return x
        x, gate_a, shift_m, scale_m, gate_m = (t[-outputs:] for t in (x, gate_a, shift_m, scale_m, gate_m))
        x = torch.addcmul(x, gate_a, attended)
        normed = _modulated_norm(x, shift_m, scale_m)
        return torch.addcmul(x, gate_m, _linear(F.gelu(_linear(normed, *self.hidden)), *self.mlp_out))

    def _attend(self, tokens: torch.Tensor, seen: _Seen, outputs: int) -> torch.Tensor:
        """Normalised tokens (n, B, S, D) -> what attention makes of the last ``outputs`` of them, (outputs, B, S, D).

        ``seen`` is brought up to date. With ``outputs`` 0, the result means nothing.
        """
        if seen.first is not None:
            return self._attend_later(tokens, *seen.first, seen.later, outputs)
        first, later = tokens[:1], tokens[1:]
        answer = _linear(first, *self.alone)
        seen.first = first, answer
        if len(later) == 0:
            return answer
        if outputs <= len(later):
            return self._attend_later(later, first, answer, seen.later, outputs)
        return torch.cat([answer, self._attend_later(later, first, answer, seen.later, len(later))])

    def _attend_later(
        self, tokens: torch.Tensor, first: torch.Tensor, answer: torch.Tensor, later: list[_KeyValue], outputs: int
    ) -> torch.Tensor:
        """``_attend`` for tokens that are not a window's first; their keys and values are appended to ``later``."""
        keys, values = _linear(tokens - first, self.keys_values).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        later += zip(keys, values, strict=True)
        if outputs == 0:
            return tokens
        queries = _linear(tokens[-outputs:], *self.query).unflatten(-1, (self.heads, -1))
        # Each query sees one token more than the one before it.
        known = len(later) - outputs + 1
        mixed = [_mix(query, later[: known + i]).flatten(-2) for i, query in enumerate(queries)]
        return _linear(torch.stack(mixed) if outputs > 1 else mixed[0].unsqueeze(0), self.out) + answer


def _mix(q: torch.Tensor, later: list[_KeyValue]) -> torch.Tensor:
    """A query (B, S, h, w) over a first token, whose key and value count as zero, and later ones -> (B, S, h, w)."""
    scores = [(q * k).sum(-1, keepdim=True) for k, _ in later]
    weights = torch.stack([torch.zeros_like(scores[0]), *scores]).softmax(0)[1:]
    mixed = weights[0] * later[0][1]
    for weight, (_, value) in zip(weights[1:], later[1:], strict=True):
        mixed = torch.addcmul(mixed, weight, value)
    return mixed


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` as one product of two matrices; with strides between tokens it would make one for each."""
    return F.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _modulated_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """AdaLN's modulation, and the second LayerNorm that the released network has behind it, less its affine part."""
    x = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-6), scale)
    return F.layer_norm(x, x.shape[-1:])


def _affine(layer: nn.Module, dtype: torch.dtype) -> _Affine:
    """Weight and bias of a linear or normalisation layer, detached."""
    weight, bias = cast("tuple[torch.Tensor, torch.Tensor]", (layer.weight, layer.bias))
    return weight.detach().to(dtype, copy=True), bias.detach().to(dtype, copy=True)


def _cast(affine: _Affine, dtype: torch.dtype) -> _Affine:
    """The same in another type."""
    return affine[0].to(dtype), affine[1].to(dtype)


def _add_one_to_scales(bias: torch.Tensor, layers: int) -> torch.Tensor:
    """The modulations' bias (layers*6*D) with which they yield 1 + scale for scale."""
    bias = bias.unflatten(0, (layers, 6, -1)).clone()
    bias[:, [1, 4]] += 1
    return bias.flatten()


def _fold_norm(norm: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> _Affine:
    """A linear layer with the affine part of the LayerNorm in front of it folded in."""
    gain, offset = _affine(norm, torch.float32)
    return weight * gain, bias + weight @ offset


def _fold_batch_norm(projector: Projector, dtype: torch.dtype) -> list[_Affine]:
    """A projector's two linear layers, with its BatchNorm's fixed statistics folded into the first."""
    norm = cast("nn.BatchNorm1d", projector[1])
    mean, variance = cast("tuple[torch.Tensor, torch.Tensor]", (norm.running_mean, norm.running_var))
    weight, bias = _affine(projector[0], torch.float32)
    gain = norm.weight.detach() * (variance + norm.eps).rsqrt()
    folded = weight * gain.unsqueeze(1), (bias - mean) * gain + norm.bias.detach()
    return [(folded[0].to(dtype), folded[1].to(dtype)), _affine(projector[3], dtype)]
