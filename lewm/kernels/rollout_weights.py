"""A frozen copy of the weights that a planning rollout needs, with everything folded into them that is constant.

That is the affine parts of the norms, BatchNorm's statistics and the attention's scale. Of the biases that this leaves
in front of attention, the keys' changes no softmax and is dropped. The values' goes through unchanged, because the
weights of a softmax sum to one, and joins the output's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lewm.errors import PlanningError
from lewm.kernels.network import Attention, Block, Network, Projector


class Affine(NamedTuple):
    """A linear layer as in ``nn.Linear``: weight (out, in) and bias (out,)."""

    weight: Tensor
    bias: Tensor

    @staticmethod
    def of(layer: nn.Linear) -> Affine:
        """A copy in float32."""
        return Affine(
            layer.weight.detach().to(torch.float32, copy=True), layer.bias.detach().to(torch.float32, copy=True)
        )

    def to(self, dtype: torch.dtype) -> Affine:
        """The same in another type."""
        return Affine(self.weight.to(dtype), self.bias.to(dtype))

    def behind(self, norm: nn.LayerNorm) -> Affine:
        """The layer with the affine part of the norm in front of it folded in."""
        return Affine(self.weight * norm.weight.detach(), self.bias + self.weight @ norm.bias.detach())

    def before(self, norm: nn.BatchNorm1d) -> Affine:
        """The layer with the norm behind it folded in, which uses its running statistics."""
        assert norm.running_mean is not None
        assert norm.running_var is not None
        gain = norm.weight.detach() * (norm.running_var + norm.eps).rsqrt()
        return Affine(self.weight * gain.unsqueeze(1), (self.bias - norm.running_mean) * gain + norm.bias.detach())


@dataclass(frozen=True)
class FoldedLayer:
    """A layer of the predictor, float32, in front of which come norms without an affine part.

    modulation: of an embedded action's activation, (6*D, D).  query: (inner, D), scaled.  keys, values: without a bias,
    (inner, D).  out: what attention has read -> (D,).  hidden, mlp_out: the MLP's two layers.
    """

    heads: int
    modulation: Affine
    query: Affine
    keys: Tensor
    values: Tensor
    out: Affine
    hidden: Affine
    mlp_out: Affine

    @staticmethod
    def of(block: Block) -> FoldedLayer:
        """A copy of a layer."""
        query, keys, values, out = _fold_attention(block.attention)
        hidden = Affine.of(block.mlp.hidden).behind(block.mlp.norm)
        modulation, mlp_out = Affine.of(block.modulation.linear), Affine.of(block.mlp.out)
        return FoldedLayer(block.attention.heads, modulation, query, keys, values, out, hidden, mlp_out)


@dataclass(frozen=True)
class FoldedWeights:
    """All weights of a rollout, float32.

    positions: (history, D).  reduce, embed_hidden, embed_out: of an action block (A,), with an activation behind the
    second only.  layers: of the predictor.  project_hidden, project_out: of the prediction; a norm comes in front.
    """

    positions: Tensor
    reduce: Affine
    embed_hidden: Affine
    embed_out: Affine
    layers: tuple[FoldedLayer, ...]
    project_hidden: Affine
    project_out: Affine

    @property
    def history(self) -> int:
        """How many tokens a window has at most."""
        return len(self.positions)

    @staticmethod
    @torch.no_grad()
    def of(model: Network) -> FoldedWeights:
        """A copy of a model's weights; the model is in evaluation mode."""
        if model.training:
            raise PlanningError("A rollout needs the model in evaluation mode. Call model.eval() first.")
        embedder, predictor = model.action_embedder, model.predictor
        project_hidden, project_out = _fold_projector(model.prediction_projector)
        return FoldedWeights(
            predictor.positions[0].detach().to(torch.float32, copy=True),
            Affine.of(embedder.reduce),
            Affine.of(embedder.mlp.hidden),
            Affine.of(embedder.mlp.out),
            tuple(FoldedLayer.of(block) for block in predictor.blocks),
            project_hidden.behind(predictor.norm),
            project_out,
        )


def _fold_attention(attention: Attention) -> tuple[Affine, Tensor, Tensor, Affine]:
    """Queries, keys, values and the way back, as in ``FoldedLayer``."""
    weight = attention.qkv.weight.detach().float()
    qkv = Affine(weight, weight.new_zeros(len(weight))).behind(attention.norm)
    (query, keys, values), (query_bias, _, values_bias) = qkv.weight.chunk(3), qkv.bias.chunk(3)
    scale = attention.head_width**-0.5
    out = Affine.of(attention.out)
    out = Affine(out.weight, out.weight @ values_bias + out.bias)
    return Affine(query * scale, query_bias * scale), keys, values, out


def _fold_projector(projector: Projector) -> tuple[Affine, Affine]:
    """A projector's two layers."""
    return Affine.of(projector.hidden).before(projector.norm), Affine.of(projector.out)


class Linear(NamedTuple):
    """A linear layer as GPU kernels take it: weight (in, out) in the type of products, bias float32 (out,)."""

    weight: Tensor
    bias: Tensor

    @staticmethod
    def of(layer: Affine, dtype: torch.dtype) -> Linear:
        """A copy with products of a type."""
        return Linear(layer.weight.T.contiguous().to(dtype), layer.bias.contiguous())


class AttentionWeights(NamedTuple):
    """qkv: queries, keys and values of all heads beside each other; only queries have a bias.  out: the way back."""

    qkv: Linear
    out: Linear

    @staticmethod
    def of(layer: FoldedLayer, dtype: torch.dtype) -> AttentionWeights:
        """Those of a layer. Scores are multiplied by log2(e), because the kernels' exponentials are powers of two."""
        factor = math.log2(math.e)
        weight = torch.cat([layer.query.weight * factor, layer.keys, layer.values])
        return AttentionWeights(
            Linear.of(Affine(weight, layer.query.bias * factor), dtype), Linear.of(layer.out, dtype)
        )


class MLPWeights(NamedTuple):
    """Two layers with an activation between them."""

    hidden: Linear
    out: Linear

    @staticmethod
    def of(hidden: Affine, out: Affine, dtype: torch.dtype) -> MLPWeights:
        """A copy with products of a type."""
        return MLPWeights(Linear.of(hidden, dtype), Linear.of(out, dtype))


@dataclass(frozen=True)
class KernelWeights:
    """``FoldedWeights`` as GPU kernels take them.

    positions: float32 (history, D).  embedder: of action blocks.  modulation: of all layers beneath each other.
    attention, mlp: of each layer.  projector: of the prediction.
    """

    positions: Tensor
    embedder: MLPWeights
    modulation: Affine
    attention: tuple[AttentionWeights, ...]
    mlp: tuple[MLPWeights, ...]
    projector: MLPWeights

    @property
    def history(self) -> int:
        """How many tokens a window has at most."""
        return len(self.positions)

    @staticmethod
    def of(weights: FoldedWeights, dtype: torch.dtype) -> KernelWeights:
        """A copy with products of a type."""
        # Nothing comes between the embedder's first two layers, so they are one.
        reduce, hidden, layers = weights.reduce, weights.embed_hidden, weights.layers
        hidden = Affine(hidden.weight @ reduce.weight, hidden.bias + hidden.weight @ reduce.bias)
        modulations = [layer.modulation.to(dtype) for layer in layers]
        return KernelWeights(
            weights.positions,
            MLPWeights.of(hidden, weights.embed_out, dtype),
            Affine(torch.cat([m.weight for m in modulations]), torch.cat([m.bias for m in modulations])),
            tuple(AttentionWeights.of(layer, dtype) for layer in layers),
            tuple(MLPWeights.of(layer.hidden, layer.mlp_out, dtype) for layer in layers),
            MLPWeights.of(weights.project_hidden, weights.project_out, dtype),
        )
