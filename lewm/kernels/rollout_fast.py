"""The rollout of a world model, arranged for planning: the numbers of the model's ``rollout`` for less work.

A planner rolls out hundreds of candidates from one context, over and over. Compared with calling the predictor on
every window, this code

- keeps keys and values while the window only grows (see ``rollout_window``);
- computes tokens that all candidates share (real frames and executed actions) once, not once per candidate;
- evaluates each action's modulation once, though its token appears in up to ``history`` windows;
- follows only the last token through the last layer, where nothing else is read;
- spares a window's first token its query, key and value. A softmax does not change when all its scores are shifted,
  and its weights sum to one: keys and values can be counted from the first token's. Then its score is zero, and its
  part of every answer is one narrow product, the values' and the output's weights multiplied beforehand;
- folds what is constant into weights (see ``rollout_weights``), here the one of 1 + scale too;
- writes attention over a handful of tokens out as products that fuse, instead of calling a kernel built for thousands.

Shapes as in ``lewm.types``; additionally n new tokens, h heads, w their width. Tokens come first, (n, B, S, D), so that
those of a window lie together in memory. The candidates' axis S has size 1 where a token is shared by all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lewm.kernels.network import Network
from lewm.kernels.rollout_weights import Affine, FoldedLayer, FoldedWeights
from lewm.kernels.rollout_window import walk


@dataclass
class _Seen:
    """What a layer's attention remembers of a window.

    first: the first token as attention reads it and what attention makes of it, (1, B, S or 1, D) each.
    later: key and value (B, S or 1, h, w) of each later token, less the first token's.
    """

    first: tuple[Tensor, Tensor] | None = None
    later: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class FastRollout:
    """Rolls out candidate plans with a frozen copy of a model's weights.

    Args:
        model: the model, in evaluation mode.
        dtype: of the arithmetic; float32 gives the model's own predictions to rounding.
    """

    def __init__(self, model: Network, dtype: torch.dtype = torch.float32) -> None:
        weights = FoldedWeights.of(model)
        self._history = weights.history
        self._dtype = dtype
        self._positions = weights.positions.to(dtype)
        self._modulations = _Modulations(weights, dtype)
        self._layers = [_Layer(layer, dtype) for layer in weights.layers]
        self._project_hidden, self._project_out = weights.project_hidden.to(dtype), weights.project_out.to(dtype)

    def __call__(self, z_BTD: Tensor, past_BTA: Tensor, actions_BSHA: Tensor) -> Tensor:
        """Predictions (B, S, H, D) in float32; arguments as for the model's ``rollout``."""
        context, horizon = z_BTD.shape[1], actions_BSHA.shape[2]
        z = [z_BTD[:, t, None].to(self._dtype) for t in range(context)]
        shared = self._modulations(past_BTA.transpose(0, 1).unsqueeze(2))
        own = self._modulations(actions_BSHA.movedim(2, 0))
        window: list[_Seen] = []
        for step in walk(context, horizon, self._history):
            if step.begins:
                window = [_Seen() for _ in self._layers]
            if step.shared:
                tokens = self._place(z, step.shared, step.start)
                self._advance(window, tokens, shared[step.shared.start : step.shared.stop], read_last=False)
            tokens = self._place(z, step.own, step.start)
            first = context - 1  # of the candidates' own
            modulation = own[step.own.start - first : step.own.stop - first]
            z.append(self._predict(self._advance(window, tokens, modulation, read_last=True)))
        return torch.stack(z[context:], dim=2).float()

    def _place(self, z: list[Tensor], new: range, start: int) -> Tensor:
        """Embeddings (B, S or 1, D) -> those of new tokens of the window from ``start``, (n, B, S or 1, D)."""
        positions = self._positions[new.start - start : new.stop - start]
        return torch.stack(torch.broadcast_tensors(*z[new.start : new.stop])) + positions[:, None, None]

    def _advance(self, window: list[_Seen], x: Tensor, modulation: Tensor, read_last: bool) -> Tensor:
        """Send new tokens (n, B, S or 1, D), modulated by (n, B, S, layers, 6, D), through all layers.

        Returns the last of them (B, S, D). With ``read_last`` False, the window remembers the tokens and the result
        means nothing.
        """
        outputs = [len(x)] * (len(self._layers) - 1) + [int(read_last)]
        for layer, mod, seen, count in zip(self._layers, modulation.unbind(-3), window, outputs, strict=True):
            x = layer(x, mod, seen, count)
        return x[-1]

    def _predict(self, x: Tensor) -> Tensor:
        """A token behind the last layer (B, S, D) -> the embedding it predicts."""
        return _linear(F.gelu(_linear(F.layer_norm(x, x.shape[-1:]), *self._project_hidden)), *self._project_out)


class _Modulations:
    """What action blocks do to all layers; all layers' come from one product."""

    def __init__(self, weights: FoldedWeights, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._reduce, self._hidden = weights.reduce.to(dtype), weights.embed_hidden.to(dtype)
        self._out = weights.embed_out.to(dtype)
        self._sizes = len(weights.layers), 6, weights.positions.shape[1]
        linears = [layer.modulation.to(dtype) for layer in weights.layers]
        self._weight = torch.cat([linear.weight for linear in linears])
        bias = torch.cat([linear.bias for linear in linears]).view(self._sizes)
        bias[:, [1, 4]] += 1  # the scales
        self._bias = bias.flatten()

    def __call__(self, actions: Tensor) -> Tensor:
        """Action blocks (n, B, S, A) -> shifts, 1 + scales and gates (n, B, S, layers, 6, D)."""
        hidden = F.linear(F.linear(actions.to(self._dtype), *self._reduce), *self._hidden)
        embedded = F.linear(F.silu(hidden), *self._out)
        return F.linear(F.silu(embedded), self._weight, self._bias).unflatten(-1, self._sizes)


class _Layer:
    """One layer of the predictor with its weights in the arithmetic's type."""

    def __init__(self, layer: FoldedLayer, dtype: torch.dtype) -> None:
        self._heads = layer.heads
        self._query = layer.query.to(dtype)
        # Of these, only differences between tokens are asked for.
        self._keys_values = torch.cat([layer.keys, layer.values]).to(dtype)
        self._out = layer.out.weight.to(dtype)
        self._alone = Affine(layer.out.weight @ layer.values, layer.out.bias).to(dtype)
        self._hidden, self._mlp_out = layer.hidden.to(dtype), layer.mlp_out.to(dtype)

    def __call__(self, x: Tensor, mod: Tensor, seen: _Seen, outputs: int) -> Tensor:
        """Tokens (n, B, S or 1, D), their modulation (n, B, S, 6, D) -> the last ``outputs`` of them, updated."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = mod.unbind(-2)
        attended = self._attend(_modulated_norm(x, shift_a, scale_a), seen, outputs)
        if outputs == 0:
            return x
        x, gate_a, shift_m, scale_m, gate_m = (t[-outputs:] for t in (x, gate_a, shift_m, scale_m, gate_m))
        x = torch.addcmul(x, gate_a, attended)
        normed = _modulated_norm(x, shift_m, scale_m)
        return torch.addcmul(x, gate_m, _linear(F.gelu(_linear(normed, *self._hidden)), *self._mlp_out))

    def _attend(self, tokens: Tensor, seen: _Seen, outputs: int) -> Tensor:
        """Normalised tokens (n, B, S, D) -> what attention makes of the last ``outputs`` of them, (outputs, B, S, D).

        ``seen`` is brought up to date. With ``outputs`` 0, the result means nothing.
        """
        if seen.first is not None:
            return self._attend_later(tokens, *seen.first, seen.later, outputs)
        first, later = tokens[:1], tokens[1:]
        answer = _linear(first, *self._alone)
        seen.first = first, answer
        if len(later) == 0:
            return answer
        if outputs <= len(later):
            return self._attend_later(later, first, answer, seen.later, outputs)
        return torch.cat([answer, self._attend_later(later, first, answer, seen.later, len(later))])

    def _attend_later(
        self, tokens: Tensor, first: Tensor, answer: Tensor, later: list[tuple[Tensor, Tensor]], outputs: int
    ) -> Tensor:
        """``_attend`` for tokens that are not a window's first; their keys and values are appended to ``later``."""
        keys, values = _linear(tokens - first, self._keys_values).unflatten(-1, (2, self._heads, -1)).unbind(-3)
        later += zip(keys, values, strict=True)
        if outputs == 0:
            return tokens
        queries = _linear(tokens[-outputs:], *self._query).unflatten(-1, (self._heads, -1))
        # Each query sees one token more than the one before it.
        known = len(later) - outputs + 1
        mixed = [_mix(query, later[: known + i]).flatten(-2) for i, query in enumerate(queries)]
        return _linear(torch.stack(mixed) if outputs > 1 else mixed[0].unsqueeze(0), self._out) + answer


def _mix(q: Tensor, later: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A query (B, S, h, w) over a first token, whose key and value count as zero, and later ones -> (B, S, h, w)."""
    scores = [(q * k).sum(-1, keepdim=True) for k, _ in later]
    weights = torch.stack([torch.zeros_like(scores[0]), *scores]).softmax(0)[1:]
    (_, value), *others = later
    mixed = weights[0] * value
    for weight, (_, value) in zip(weights[1:], others, strict=True):
        mixed = torch.addcmul(mixed, weight, value)
    return mixed


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` as one product of two matrices; with strides between tokens it would make one for each."""
    return F.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """AdaLN's modulation, and the second LayerNorm that the released network has behind it, less its affine part."""
    x = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-6), scale)
    return F.layer_norm(x, x.shape[-1:])
