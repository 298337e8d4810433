"""What a planning rollout reads of a world model; this package may not import ``lewm.model``, where the modules are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


class TwoLayers(Protocol):
    """Two linear layers with an activation between them."""

    @property
    def hidden(self) -> nn.Linear: ...
    @property
    def out(self) -> nn.Linear: ...


class NormedLayers(TwoLayers, Protocol):
    """Two linear layers, and a LayerNorm in front of the first."""

    @property
    def norm(self) -> nn.LayerNorm: ...


class Projector(TwoLayers, Protocol):
    """Two linear layers, and a BatchNorm behind the first."""

    @property
    def norm(self) -> nn.BatchNorm1d: ...


class ActionEmbedder(Protocol):
    """A linear layer, and two more behind it."""

    @property
    def reduce(self) -> nn.Linear: ...
    @property
    def mlp(self) -> TwoLayers: ...


class Modulation(Protocol):
    """What makes shifts, scales and gates of an embedded action."""

    @property
    def linear(self) -> nn.Linear: ...


class Attention(Protocol):
    """Causal attention with a LayerNorm of its own."""

    heads: int
    head_width: int

    @property
    def norm(self) -> nn.LayerNorm: ...
    @property
    def qkv(self) -> nn.Linear: ...
    @property
    def out(self) -> nn.Linear: ...


class Block(Protocol):
    """A layer of the predictor."""

    @property
    def modulation(self) -> Modulation: ...
    @property
    def attention(self) -> Attention: ...
    @property
    def mlp(self) -> NormedLayers: ...


class Predictor(Protocol):
    """positions: (1, history, D).  blocks: a ``Block`` each."""

    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def blocks(self) -> Iterable[Any]: ...
    @property
    def norm(self) -> nn.LayerNorm: ...


class Network(Protocol):
    """A world model without its encoder."""

    training: bool

    @property
    def device(self) -> torch.device: ...
    @property
    def action_embedder(self) -> ActionEmbedder: ...
    @property
    def predictor(self) -> Predictor: ...
    @property
    def prediction_projector(self) -> Projector: ...


@dataclass(frozen=True)
class Sizes:
    """How large a network is, read off its modules. embedding: D.  mlp, projector: their hidden units."""

    history: int
    embedding: int
    depth: int
    heads: int
    head_width: int
    mlp: int
    projector: int

    @staticmethod
    def of(model: Network) -> Sizes:
        """The sizes of a model, whose layers are all alike."""
        _, history, embedding = model.predictor.positions.shape
        layers: list[Block] = list(model.predictor.blocks)
        layer, *_ = layers
        attention, mlp, projector = layer.attention, layer.mlp.hidden, model.prediction_projector.hidden
        return Sizes(
            history,
            embedding,
            len(layers),
            attention.heads,
            attention.head_width,
            mlp.out_features,
            projector.out_features,
        )
