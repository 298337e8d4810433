"""The decoder itself, the reconstruction loss, and the detectors that look at what was drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from lewm.checked import to_dict
from lewm.envs.pusht_geometry import TEE_CORNERS, to_world
from lewm.envs.registry import make_env
from lewm.methods.files import identity, load
from lewm.methods.lewm import LeWM
from lewm.model.decoder import Decoder, _Layer, cut, join, patch_size
from lewm.presets import preset
from lewm.types import ALONE, Batch, DataFacts, Losses
from lewm.understand.places import block_places, dot_places

SETTINGS = preset("debug").method


def dots(places: list[tuple[float, float]], size: int) -> np.ndarray:
    with make_env("tworoom", size) as env:
        return env.render_states(np.array(places, np.float64))


# -- the network ---------------------------------------------------------------------------------------------------


def test_with_one_key_attention_is_a_linear_map():
    torch.manual_seed(0)
    attention, layer = nn.MultiheadAttention(32, 8, batch_first=True), _Layer(32)
    nn.init.normal_(attention.in_proj_bias)
    value, bias = attention.in_proj_weight[64:], attention.in_proj_bias[64:]
    with torch.no_grad():
        layer.attended.weight.copy_(attention.out_proj.weight @ value)
        layer.attended.bias.copy_(attention.out_proj.weight @ bias + attention.out_proj.bias)
    queries, token = torch.randn(3, 7, 32), torch.randn(3, 1, 32)
    attended, _ = attention(queries, token, token)
    torch.testing.assert_close(layer.attended(token).expand(-1, 7, -1), attended, rtol=1e-4, atol=1e-5)
    after = layer.norm(queries + attended)
    torch.testing.assert_close(layer(queries, token), layer.mlp_norm(after + layer.mlp(after)), rtol=1e-4, atol=1e-5)


def test_it_has_the_published_size_at_224_and_enough_patches_below():
    decoder = Decoder(192, 224)
    assert decoder.queries.shape == (196, 256)
    assert decoder.pixels.out_features == 16 * 16 * 3
    assert [patch_size(size) for size in (28, 56, 64, 96)] == [4, 8, 8, 12]


def test_patches_are_cut_and_joined():
    frames = torch.randint(0, 256, (2, 28, 28, 3), dtype=torch.uint8)
    assert torch.equal(join(cut(frames, 4), 4), frames)
    assert torch.equal(cut(frames, 4)[1, 8].view(4, 4, 3), frames[1, 4:8, 4:8])


def test_it_begins_with_the_background_and_overfits_8_frames():
    torch.manual_seed(0)
    real = dots([(30 + 20 * i, 30 + 21 * i if i % 2 else 190 - 20 * i) for i in range(8)], 28)
    background = np.median(real, axis=0).astype(np.uint8)
    decoder, z, frames = Decoder(8, 28, background, width=64), torch.eye(8), torch.from_numpy(real)
    assert np.array_equal(decoder.frames(z).numpy(), np.broadcast_to(background, real.shape))
    optimizer = torch.optim.AdamW(decoder.parameters(), 3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        decoder.loss(z, frames).backward()
        optimizer.step()
    drawn = decoder.frames(z).numpy()
    assert np.abs(drawn.astype(int) - real).mean() < 1
    assert np.abs(drawn.astype(int) - real).max() < 60
    assert np.linalg.norm(dot_places(drawn) - dot_places(real), axis=1).max() < 2


def test_what_differs_from_the_background_weighs_more():
    decoder = Decoder(4, 28, np.zeros((28, 28, 3), np.uint8), width=16)
    frame = torch.zeros(1, 28, 28, 3, dtype=torch.uint8)
    frame[0, 3, 5, 1] = 255  # one pixel of 784, in one of three colours; the decoder draws the background
    for weight in (1.0, 30.0):
        expected = weight / (3 * (784 + weight - 1))
        assert decoder.loss(torch.zeros(1, 4), frame, weight).item() == pytest.approx(expected, rel=1e-5)


# -- the paper's ablation --------------------------------------------------------------------------------------------


def made(weight: float) -> LeWM:
    torch.manual_seed(0)
    return LeWM(replace(SETTINGS, reconstruction=weight), DataFacts())


def losses(model: LeWM) -> Losses:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (4, 4, 28, 28, 3), dtype=torch.uint8, generator=generator)
    model.eval().facts  # noqa: B018
    model.normalise_actions = lambda raw: raw.flatten(-2)  # type: ignore[method-assign]
    batch = Batch(torch.randn(4, 4, 5, 2, generator=generator), pixels)
    return model.losses(batch, model.draws(0, 0, model.device), ALONE)


def gradient(model: LeWM) -> torch.Tensor:
    losses(model).total.backward()
    return torch.cat([p.grad.flatten() for p in model.encoder.parameters() if p.grad is not None])


def test_weight_0_is_the_model_without_it():
    model = made(0.0)
    assert not any("decoder" in name for name in model.state_dict())
    assert set(losses(model).terms) == {"prediction", "sigreg"}
    assert "reconstruction" not in to_dict(model.settings)  # or every older model's digest would have changed
    drawn = made(1.0).state_dict()
    assert all(torch.equal(tensor, drawn[name]) for name, tensor in model.state_dict().items())


def test_a_weight_pulls_at_the_encoder():
    first = made(1.0)
    with torch.no_grad():
        first.decoder.pixels.weight.normal_(std=0.02)  # at 0, where it begins, nothing reaches the embedding
    found = losses(first)
    terms = found.terms
    expected = terms["prediction"] + 0.09 * terms["sigreg"] + terms["reconstruction"]
    torch.testing.assert_close(found.total, expected)
    assert not torch.allclose(gradient(first), gradient(made(0.0)), rtol=1e-2)


def test_its_decoder_is_saved_with_the_model(tmp_path: Path):
    model = made(0.5)
    model.save_pretrained(tmp_path)
    read = load(tmp_path, "cpu")
    assert read.settings.reconstruction == 0.5
    assert torch.equal(read.decoder.queries, model.decoder.queries)
    assert identity(read) == identity(model) != identity(made(0.0))


# -- detectors -------------------------------------------------------------------------------------------------------


def block_middle(state: np.ndarray) -> np.ndarray:
    """The middle of the T's area, in pixels of 512."""
    boxes = to_world(TEE_CORNERS, state[2:5])
    sides = TEE_CORNERS[:, 1] - TEE_CORNERS[:, 0], TEE_CORNERS[:, 2] - TEE_CORNERS[:, 1]
    areas = np.linalg.norm(sides[0], axis=1) * np.linalg.norm(sides[1], axis=1)
    return (boxes.mean(1) * areas[:, None]).sum(0) / areas.sum()


@pytest.mark.parametrize("size", [224, 96])
@pytest.mark.parametrize("blurred", [False, True])
def test_the_block_is_found_where_it_is(size: int, blurred: bool):
    rng = np.random.default_rng(0)
    states = np.zeros((60, 7))
    states[:, :2], states[:, 2:4] = rng.uniform(50, 460, (60, 2)), rng.uniform(120, 390, (60, 2))
    states[:, 4] = rng.uniform(0, 2 * np.pi, 60)
    with make_env("pusht", size) as env:
        frames = env.render_states(states[:, : len(env.state)])
    if blurred:  # as decoders draw
        frames = np.stack([cv2.GaussianBlur(frame, (0, 0), size / 112) for frame in frames])
    expected = np.stack([block_middle(state) for state in states]) * 224 / 512
    errors = np.linalg.norm(block_places(frames) - expected, axis=1)
    apart = np.linalg.norm(states[:, :2] - states[:, 2:4], axis=1) > 130  # the agent is drawn over the block
    assert apart.sum() > 25
    assert np.median(errors[apart]) < 0.7
    assert errors[apart].max() < 2
    assert np.median(errors) < 1


def test_the_dot_is_found_where_it_is():
    places = [(30.0, 40.0), (180.0, 200.0), (112.0, 49.0)]
    for size in (224, 56):
        assert np.abs(dot_places(dots(places, size)) - places).max() < 1.5


def test_what_is_not_there_is_not_found():
    assert np.isnan(dot_places(np.full((2, 28, 28, 3), 255, np.uint8))).all()
    with make_env("pusht", 96) as env:
        away = env.render_states(np.array([[100.0, 100.0, 740.0, 740.0, 0.0, 0.0, 0.0][: len(env.state)]]))
    assert np.isnan(block_places(away)).all()
