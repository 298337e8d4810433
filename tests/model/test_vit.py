"""The vision transformer. That it equals Hugging Face's is shown in test_official.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lewm.config import EncoderConfig
from lewm.model.vit import IMAGENET_MEAN, IMAGENET_STD, PatchEmbedding, ViT

CONFIG = EncoderConfig(image_size=28, patch_size=14, depth=2, heads=2, width=16, mlp_width=32)


def random_frames(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 28, 28, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_patches_are_a_convolution_over_imagenet_normalised_pixels() -> None:
    patches, frames = PatchEmbedding(CONFIG), random_frames(3)
    normalised = (frames / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    kernel = patches.project.weight.view(16, 14, 14, 3).permute(0, 3, 1, 2)
    convolved = F.conv2d(normalised.permute(0, 3, 1, 2), kernel, patches.project.bias, stride=14)
    torch.testing.assert_close(patches(frames), convolved.flatten(2).transpose(1, 2))


@torch.inference_mode()
def test_every_patch_and_its_place_matter() -> None:
    torch.manual_seed(0)
    vit, frame = ViT(CONFIG).eval(), random_frames(1)
    z = vit(frame)
    assert z.shape == (1, 16)
    for row in (0, 14):
        for column in (0, 14):
            changed = frame.clone()
            changed[:, row : row + 14, column : column + 14] = 0
            assert (vit(changed) - z).abs().max() > 1e-5
    swapped = torch.cat([frame[:, 14:], frame[:, :14]], dim=1)
    assert (vit(swapped) - z).abs().max() > 1e-5


@torch.inference_mode()
def test_frames_do_not_see_one_another() -> None:
    torch.manual_seed(0)
    vit, frames = ViT(CONFIG).eval(), random_frames(4)
    torch.testing.assert_close(vit(frames)[2:3], vit(frames[2:3]))


def test_gradients_reach_every_parameter() -> None:
    torch.manual_seed(0)
    vit = ViT(CONFIG)
    vit(random_frames(2)).square().mul(torch.randn(16)).sum().backward()
    without = [name for name, p in vit.named_parameters() if p.grad is None or not p.grad.any()]
    # A bias common to all keys shifts all scores of a query alike, so only that third of the fused bias is inert.
    assert without == []
    assert vit.blocks[0].attention.qkv.bias.grad[16:32].abs().max() == pytest.approx(0, abs=1e-6)


@torch.inference_mode()
def test_the_last_layer_computes_only_what_is_read() -> None:
    torch.manual_seed(0)
    vit, x_NPW = ViT(CONFIG).eval(), torch.randn(3, 5, 16)
    for block in vit.blocks:
        torch.testing.assert_close(block.first_token(x_NPW), block(x_NPW)[:, 0])
