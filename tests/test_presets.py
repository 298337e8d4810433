"""Presets, and runs that files describe: their way to JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lewm.checked import to_dict
from lewm.config import Config, TrainConfig
from lewm.errors import ConfigError
from lewm.methods.lewm import LeWMConfig
from lewm.presets import PRESETS, changed, preset, read_config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_together(name: str):
    config = preset(name)
    assert config.collect.resolution == config.method.encoder.image_size
    assert config.plan.horizon * config.method.frame_skip <= config.eval.budget
    assert config.train.warmup_steps < config.train.steps


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"Unknown preset 'tworooms'. Did you mean 'tworoom'"):
        preset("tworooms")


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(ConfigError, match=r"Unknown method 'lewn'. Did you mean 'lewm'"):
        preset("debug", "lewn")


@pytest.mark.parametrize("name", PRESETS)
def test_json_and_back(name: str):
    config = replace(preset(name), data=Path("data/x.h5"), out=Path("runs/x"))
    assert read_config(json.loads(json.dumps(to_dict(config)))) == config
    bare = replace(config, data=None, out=None)
    assert read_config(json.loads(json.dumps(to_dict(bare)))) == bare


def test_json_says_which_method_it_is():
    document = to_dict(preset("debug"))
    assert document["method"]["name"] == "lewm"
    del document["method"]["name"]
    assert read_config(document) == preset("debug")  # as before there were others


def test_what_is_not_given_keeps_its_default():
    assert read_config({"train": {"steps": 3}}) == Config(LeWMConfig(), train=TrainConfig(steps=3))


def test_settings_are_changed_by_old_and_new_names():
    found = changed(preset("cube"), {"plan.recorded": 3, "plan.icem.momentum": 0.3, "eval.episodes": 200})
    assert (found.plan.icem.recorded, found.plan.icem.momentum, found.eval.episodes) == (3, 0.3, 200)
    with pytest.raises(ConfigError, match=r"plan\.effort was 0\.5, which is gone"):
        changed(preset("cube"), {"plan.effort": 0.5})
