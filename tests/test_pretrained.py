"""The models that come with the repository: they load, and know the world that they are for."""

from __future__ import annotations

import pytest
import torch

from lewm.checkpoint import load_document, pretrained_models
from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.export.card import CARD, model_card
from lewm.methods.lewm import LeWM

# How much of a frame's change is left unpredicted at most. Push-T's model knows replays of demonstrations; what moves
# there without any is a scripted pusher, which it has never seen.
UNFORESEEN = {"cube": 0.1, "pusht": 0.2, "reacher": 0.1, "tworoom": 0.1}
FRAMES = 12


def test_every_model_is_here():
    assert sorted(pretrained_models()) == sorted(UNFORESEEN)


@pytest.mark.parametrize("name", UNFORESEEN)
def test_a_card_says_what_the_model_knows_of_itself(name: str):
    folder, model = pretrained_models()[name], LeWM.from_pretrained(name, device="cpu")
    assert (folder / CARD).read_text(encoding="utf-8") == model_card(name, load_document(folder), model)


@pytest.mark.parametrize("name", UNFORESEEN)
def test_a_model_remembers_actions_like_those_it_was_trained_on(name: str):
    model = LeWM.from_pretrained(name, device="cpu")
    assert model.recorded_actions is not None
    count, steps, action_dim = model.recorded_actions.shape
    assert (count, steps, action_dim) == (1024, 50, model.action_dim)
    blocks = model.normalise_actions(model.recorded_actions.unflatten(1, (-1, model.frame_skip)))
    numbers = blocks.unflatten(-1, (-1, action_dim)).flatten(0, -2)
    assert numbers.mean(0).abs().max() < 0.1
    assert (numbers.std(0) - 1).abs().max() < 0.1


@pytest.mark.parametrize("name", UNFORESEEN)
@torch.inference_mode()
def test_a_model_foresees_what_its_world_does(name: str):
    """The prediction from three frames is far nearer to the next one than the last of them is."""
    pytest.importorskip("mujoco")
    model = LeWM.from_pretrained(name, device="cpu")
    skip = model.frame_skip
    episode = generate_episode(name, model.image_size, HELD_OUT_SEED, 0, frame_stride=skip)
    first = int(episode["frame_step"][0])
    actions = torch.from_numpy(episode["action"][first : first + FRAMES * skip])
    blocks_TA = model.normalise_actions(actions.view(FRAMES, skip, model.action_dim))
    z_TD = model.encode(torch.from_numpy(episode["pixels"][:FRAMES]))
    z_BTD = z_TD.unfold(0, model.history + 1, 1).mT  # windows of frames in a row
    blocks_BTA = blocks_TA.unfold(0, model.history + 1, 1).mT
    predicted_BD = model.predict(z_BTD[:, :-1], blocks_BTA[:, :-1])[:, -1]
    error, change = ((z_BD - z_BTD[:, -1]).square().mean() for z_BD in (predicted_BD, z_BTD[:, -2]))
    assert error < UNFORESEEN[name] * change
