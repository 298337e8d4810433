"""The vision transformer. That it equals Hugging Face's is shown in test_official.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lewm.config import EncoderConfig
from lewm.model.vit import IMAGENET_MEAN, IMAGENET_STD, PatchEmbedding, ViT, changed_patches

CONFIG = EncoderConfig(image_size=28, patch_size=14, depth=2, heads=2, width=16, mlp_width=32)
GRID_6 = EncoderConfig(image_size=84, patch_size=14, depth=2, heads=2, width=16, mlp_width=32)


def random_frames(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 28, 28, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_patches_are_a_convolution_over_imagenet_normalised_pixels() -> None:
    patches, frames = PatchEmbedding(CONFIG), random_frames(3)
    normalised = (frames / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    kernel = patches.project.weight.view(16, 14, 14, 3).permute(0, 3, 1, 2)
    convolved = F.conv2d(normalised.permute(0, 3, 1, 2), kernel, patches.project.bias, stride=14)
    torch.testing.assert_close(patches(patches.cut(frames)), convolved.flatten(2).transpose(1, 2))


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
    vit, (x_NPW, change_NPW) = ViT(CONFIG).eval(), torch.randn(2, 3, 5, 16)
    for block in vit.blocks:
        torch.testing.assert_close(block.first_token(x_NPW, change_NPW), sum(block(x_NPW, change_NPW))[:, 0])


# -- patches that are left out --------------------------------------------------------------------------------


def keeping(count: int, background_noise: float = 0.0) -> ViT:
    """An encoder of 6 x 6 patches that looks at so many of them, before a background of 100."""
    torch.manual_seed(0)
    vit = ViT(dataclasses.replace(GRID_6, kept_patches=count, background_noise=background_noise)).eval()
    vit.background.fill_(100)
    return vit


def spotted(*patches: int, value: int = 200) -> torch.Tensor:
    """A frame of the background, (1, 84, 84, 3), with one pixel changed in each of the patches."""
    frame = torch.full((1, 84, 84, 3), 100, dtype=torch.uint8)
    for patch in patches:
        frame[0, 14 * (patch // 6) + 3, 14 * (patch % 6) + 5, 1] = value
    return frame


@torch.inference_mode()
def test_keeping_all_patches_is_the_same_function() -> None:
    some, frames = keeping(36), torch.randint(0, 256, (3, 84, 84, 3), dtype=torch.uint8)
    whole = ViT(GRID_6).eval()
    whole.load_state_dict({name: value for name, value in some.state_dict().items() if name != "background"})
    torch.testing.assert_close(some(frames), whole(frames))


@torch.inference_mode()
def test_it_keeps_what_differs_most_and_of_equals_the_first() -> None:
    vit, frame = keeping(4), spotted(7, 35) + spotted(20, value=110) - 100
    assert vit.least_like_background(vit.patches.cut(frame)).tolist() == [[7, 35, 20, 0]]
    darker = spotted(30, value=0)  # as far from the background as 200 is
    assert vit.least_like_background(vit.patches.cut(darker)).tolist() == [[30, 0, 1, 2]]


@torch.inference_mode()
def test_what_a_driver_draws_a_little_differently_is_background() -> None:
    numbers = 14 * 14 * 3
    vit, frame = keeping(4, background_noise=20.5 / numbers), spotted(7, 35) + spotted(20, value=120) - 100
    assert vit.least_like_background(vit.patches.cut(frame)).tolist() == [[7, 35, 0, 1]]
    more = spotted(7, 35) + spotted(20, value=121) - 100
    assert vit.least_like_background(vit.patches.cut(more)).tolist() == [[7, 35, 20, 0]]


@torch.inference_mode()
def test_a_kept_patch_is_a_token_with_its_own_position() -> None:
    vit, frame = keeping(2), spotted(7, 35)
    tokens, positions = vit.embed(frame)
    assert torch.equal(positions[0], vit.positions[0, [0, 1 + 7, 1 + 35]])
    expected = vit.patches(vit.patches.cut(frame))[0, [7, 35]]
    torch.testing.assert_close(tokens[0, 1:], expected)
    assert torch.equal(tokens[0, :1], vit.cls_token[0])


@torch.inference_mode()
def test_a_frame_is_the_same_in_any_company_and_what_is_left_out_does_not_count() -> None:
    vit, frames = keeping(2), torch.cat([spotted(7, 35), spotted(0), spotted(7, 35)])
    frames[2, 80, 3, 0] = 101  # patch 30: less different than the other two
    together = vit(frames)
    torch.testing.assert_close(together[:1], vit(frames[:1]))
    assert torch.equal(together[0], together[2])
    assert not torch.allclose(together[0], together[1])


def test_positions_of_patches_that_are_kept_learn() -> None:
    vit = keeping(2)
    vit(spotted(7, 35)).square().mul(torch.randn(16)).sum().backward()
    assert vit.positions.grad is not None
    learning = vit.positions.grad[0].abs().sum(-1).gt(0).nonzero().flatten().tolist()
    assert learning == [0, 1 + 7, 1 + 35]


def test_patches_that_differ_by_more_than_a_grey_level_are_counted() -> None:
    empty = np.full((4, 4, 3), 100, np.uint8)
    frames = np.stack([empty] * 4)
    frames[1, 0, 0] = 90  # of a patch of 12 numbers three by ten: 2.5 on average
    frames[2, 0, 0] = 98  # 0.5
    frames[3, 1:3, 1:3] = 255  # one pixel of every patch
    assert changed_patches(frames, empty, patch_size=2).tolist() == [0, 1, 0, 4]
    assert changed_patches(frames, empty, patch_size=2, threshold=0.4).tolist() == [0, 1, 1, 4]


@pytest.mark.parametrize(("noise", "warned"), [(0.0, True), (2.0, True), (3.0, False)])
def test_a_remark_about_left_out_patches_takes_noise_for_background(noise: float, warned: bool) -> None:
    """As the encoder does, which would give such patches no place before others."""
    vit = ViT(EncoderConfig(28, depth=1, heads=1, width=8, mlp_width=8, kept_patches=1, background_noise=noise))
    frames = np.full((3, 28, 28, 3), 3, np.uint8)  # all four patches, by three grey levels
    assert bool(vit.remarks(frames)) == warned
