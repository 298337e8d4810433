"""Frozen encoders, whose features can stand in place of pixels, by the names that ``--method.features`` takes:

    CHECKPOINT               the embedding of a model that encodes, (D,): a folder, a run, a name or a hub id
    tokens:CHECKPOINT        the patches of a model's vision transformer, (patches, W)
    efficientnet-lite0       ImageNet features, 14 x 14 of 112 numbers; extra ``efficientnet``
    dinov2:SOURCE            DINOv2 as DINO-WM looks through it, 14 x 14 tokens; extra ``dino``
    dinov2-authors:SOURCE    the same as LeWM's authors do in their comparison, 16 x 16 tokens

SOURCE is a folder that ``transformers`` has written, or a hub id ("facebook/dinov2-small"). The networks of others take
frames of 224 pixels, or of as many as a name ends with: "efficientnet-lite0@56". A folder with the name of a network is
meant by "./efficientnet-lite0".
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from lewm import checkpoint
from lewm.errors import CheckpointError, ConfigError, unknown_name
from lewm.files import json_digest
from lewm.methods.files import identity, load
from lewm.model import foundation
from lewm.model.vit import ViT

IMAGE_SIZE = 224  # of the frames that networks of others take, unless their name says otherwise
EFFICIENTNET = "efficientnet-lite0"
EXAMPLES = ("CHECKPOINT", "tokens:CHECKPOINT", EFFICIENTNET, "dinov2:SOURCE", "dinov2-authors:SOURCE")


class _Encodes(Protocol):
    def encode(self, pixels: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class FrozenEncoder:
    """A network that is never trained here. name: how it was asked for.  digest: of all that it is.

    shape: of the features of one frame.  image_size: of the frames that it takes.  half: tokens, which are many: they
    are computed in float16 on a GPU, and kept in float16 on disk.  any_size: it takes frames of any size that its name
    ends with.  world: where it was trained, None: in none of ours.
    """

    name: str
    digest: str
    module: nn.Module
    shape: tuple[int, ...]
    image_size: int
    half: bool = False
    any_size: bool = False
    world: str | None = None

    def for_frames(self, size: int) -> str:
        """What to ask for where frames have so many pixels."""
        return f"{_sized(self.name)[0]}@{size}" if self.any_size else "NAME"

    def to(self, device: torch.device) -> FrozenEncoder:
        """The same on another device, where it then is."""
        self.module.to(device)
        return self

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Frames uint8 (N, R, R, 3), on its device -> features float32 (N, *shape)."""
        # Tokens of float16 differ from those of float32 by 0.1 to 0.5 % of their spread, of bfloat16 by up to 5.6 %.
        narrow = self.half and pixels.is_cuda
        with torch.autocast("cuda", torch.float16) if narrow else contextlib.nullcontext():
            return cast(_Encodes, self.module).encode(pixels).float()

    def kept(self, pixels: torch.Tensor) -> torch.Tensor:
        """The same as they are kept on disk: float16 (N, *shape) if ``half``."""
        features = self(pixels)
        if not self.half:
            return features
        most, largest = torch.finfo(torch.float16).max, features.abs().max().item()
        if most < largest < math.inf:
            given = f"method.features: {self.name} gives numbers up to {largest:.2e}"
            raise ConfigError(f"{given}, and float16 holds none above {most:,.0f}. Take another encoder.")
        return features.half()


def frozen_encoder(name: str, digest: str | None = None, device: str | torch.device = "cpu") -> FrozenEncoder:
    """The encoder of a name, as above. digest: what it must be, None: whatever it is."""
    encoder = _opened(name)
    if digest not in (None, encoder.digest):
        raise CheckpointError(
            f"{name} is not the encoder whose features this model has seen (digest {encoder.digest[:12]} here, "
            f"{str(digest)[:12]} then). Put that one there again, or train anew with this one."
        )
    return encoder.to(torch.device(device))


def _opened(name: str) -> FrozenEncoder:
    """On the CPU, of whatever kind the name says."""
    kind, colon, source = name.partition(":")
    plain, size = _sized(name)
    if plain == EFFICIENTNET:
        return _frozen(name, foundation.efficientnet_lite0(size), any_size=True)
    if colon and kind in _KINDS:
        if not source:
            raise ConfigError(f"method.features: {name} lacks what stands after the colon. Known: {_listed()}.")
        return _KINDS[kind](name, source)
    if colon and not Path(name).exists():
        raise ConfigError(f"method.features: {unknown_name('kind of features', kind, _KINDS)} As in {_listed()}.")
    if len(Path(name).parts) == 1 and not Path(name).exists() and name not in checkpoint.pretrained_models():
        known = [*checkpoint.pretrained_models(), *EXAMPLES]
        raise ConfigError(
            f"method.features: {unknown_name('features', name, known)} Nor is there a folder of that name."
        )
    return _embeddings(name)


def _listed() -> str:
    return ", ".join(EXAMPLES)


def _sized(name: str) -> tuple[str, int]:
    """A name without the size of frames that it may end with, and that size."""
    match = re.fullmatch(r"(.+)@(\d+)", name)
    return (match[1], int(match[2])) if match else (name, IMAGE_SIZE)


def _embeddings(name: str) -> FrozenEncoder:
    """What a model makes of a whole frame."""
    model = load(name, "cpu")
    if not hasattr(model, "encode"):
        problem = f"is of the method {model.settings.NAME!r}, which does not encode"
        raise ConfigError(f"method.features: {name} {problem}. Take its patches, tokens:{name}, or another model.")
    model.requires_grad_(False)
    shape, world = _shape(model, model.image_size), model.facts.environment
    return FrozenEncoder(name, identity(model), model, shape, model.image_size, world=world)


def _tokens(name: str, source: str) -> FrozenEncoder:
    """What a model's vision transformer makes of each patch."""
    model = load(source, "cpu")
    vit = next((module for module in model.modules() if isinstance(module, ViT)), None)
    if vit is None:
        problem = f"{source} is of the method {model.settings.NAME!r} and has no vision transformer, so no patches"
        raise ConfigError(f"method.features: {problem}. Name a model that has one.")
    vit.use_kernels(False)  # they are made for training
    network = foundation.PatchTokens(vit, json_digest(["tokens", identity(model)]))
    return replace(_frozen(name, network), world=model.facts.environment)


def _dinov2(look: foundation.Look, name: str, source: str) -> FrozenEncoder:
    plain, size = _sized(source)
    if Path(source).is_dir():  # a folder may end like a size
        plain, size = source, IMAGE_SIZE
    if size < 1:
        raise ConfigError(f"method.features: {name} asks for frames of {size} pixels. Give a positive number.")
    folder = Path(plain) if Path(plain).is_dir() else checkpoint.from_hub(plain, ["config.json", "*.safetensors*"])
    return _frozen(name, foundation.dinov2(folder, look, size), any_size=True)


_KINDS: dict[str, Callable[[str, str], FrozenEncoder]] = {
    "tokens": _tokens,
    "dinov2": functools.partial(_dinov2, foundation.DINO_WM),
    "dinov2-authors": functools.partial(_dinov2, foundation.DINO_AUTHORS),
}


def _frozen(name: str, network: foundation.TokenNetwork, any_size: bool = False) -> FrozenEncoder:
    network.eval().requires_grad_(False)
    size = network.image_size
    return FrozenEncoder(name, network.digest, network, _shape(network, size), size, half=True, any_size=any_size)


@torch.no_grad()
def _shape(module: nn.Module, size: int) -> tuple[int, ...]:
    """Of the features of one frame."""
    black = torch.zeros(1, size, size, 3, dtype=torch.uint8)
    return tuple(cast(_Encodes, module).encode(black).shape[1:])
