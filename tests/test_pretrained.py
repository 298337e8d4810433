"""The models that come with the repository: they load, and know the world that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lewm.checkpoint import CONFIG, load_document, pretrained_models
from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.errors import CheckpointError
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
def test_a_model_says_how_its_data_were_collected(name: str):
    document = load_document(pretrained_models()[name])
    told, data = document["run"]["collect"], document["data"]
    for item in ("episodes", "resolution", "frame_stride", "exploration", "mistakes"):
        assert told[item] == data[item], item
    assert told["demos"] == (f"sha256:{data['demonstrations']}" if data["demonstrations"] else None)
    if name == "cube":
        assert (told["episodes"], told["exploration"], told["mistakes"]) == (16_000, 0.6, 0.7)


@pytest.mark.parametrize("name", UNFORESEEN)
def test_settings_that_no_tensor_shows_cannot_be_edited(name: str, tmp_path: Path):
    """As the number of heads, with which the same weights compute something else."""
    for path in pretrained_models()[name].iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / CONFIG).unlink()
    text = (pretrained_models()[name] / CONFIG).read_text(encoding="utf-8")
    assert '"heads": 3' in text
    (tmp_path / CONFIG).write_text(text.replace('"heads": 3', '"heads": 1'), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not what was written"):
        LeWM.from_pretrained(tmp_path, device="cpu")


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
