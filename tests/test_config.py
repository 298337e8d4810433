"""Configurations: presets, their way to JSON and back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from lewm.config import (
    PRESETS,
    CollectConfig,
    Config,
    EncoderConfig,
    EvalConfig,
    LoaderConfig,
    ModelConfig,
    PlanConfig,
    PredictorConfig,
    SigregConfig,
    TrainConfig,
    from_dict,
    preset,
    to_dict,
)
from lewm.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_together(name: str):
    config = preset(name)
    assert config.collect.resolution == config.model.encoder.image_size
    assert config.plan.horizon * config.model.frame_skip <= config.eval.budget
    assert config.train.warmup_steps < config.train.steps


def test_the_defaults_are_the_papers_configuration():
    config = Config()
    encoder, predictor = config.model.encoder, config.model.predictor
    assert (encoder.image_size, encoder.patch_size, encoder.depth, encoder.heads, encoder.width) == (
        224,
        14,
        12,
        3,
        192,
    )
    assert (predictor.depth, predictor.heads, predictor.dropout) == (6, 16, 0.1)
    assert (config.model.embed_dim, config.model.history, config.model.frame_skip) == (192, 3, 5)
    assert (config.sigreg.weight, config.sigreg.directions, config.sigreg.knots) == (0.09, 1024, 17)
    assert (config.train.batch_size, config.train.lr, config.train.weight_decay) == (128, 5e-5, 1e-3)
    assert (config.plan.samples, config.plan.elites, config.plan.iterations) == (300, 30, 30)
    assert (config.eval.episodes, config.eval.budget) == (50, 50)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"Unknown preset 'tworooms'. Did you mean 'tworoom'"):
        preset("tworooms")


@pytest.mark.parametrize("name", PRESETS)
def test_json_and_back(name: str):
    config = replace(preset(name), data=Path("data/x.h5"), out=Path("runs/x"))
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config
    bare = replace(config, data=None, out=None)
    assert from_dict(Config, json.loads(json.dumps(to_dict(bare)))) == bare


def test_what_is_not_given_keeps_its_default():
    assert from_dict(Config, {"train": {"steps": 3}}) == Config(train=TrainConfig(steps=3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sede": 1}, "Unknown field 'sede'. Did you mean 'seed'"),
        ({"train": {"stepz": 1}}, "Unknown field 'train.stepz'. Did you mean 'train.steps'"),
        ({"model": {"encoder": {"dept": 1}}}, "Unknown field 'model.encoder.dept'. Did you mean 'model.encoder.depth'"),
    ],
)
def test_an_unknown_field_names_the_nearest(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        from_dict(Config, values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: EncoderConfig(depth=0), "encoder.depth"),
        (lambda: EncoderConfig(image_size=100), "encoder.image_size"),
        (lambda: EncoderConfig(heads=5), "encoder.width"),
        (lambda: PredictorConfig(dropout=1.0), "predictor.dropout"),
        (lambda: PredictorConfig(heads=-1), "predictor.heads"),
        (lambda: ModelConfig(history=0), "model.history"),
        (lambda: ModelConfig(action_bottleneck=0), "model.action_bottleneck"),
        (lambda: SigregConfig(weight=-0.1), "sigreg.weight"),
        (lambda: SigregConfig(knots=1), "sigreg.knots"),
        (lambda: SigregConfig(t_min=3.0), "sigreg.t_min"),
        (lambda: PlanConfig(solver="icem", recorded=31), "plan.recorded"),
        (lambda: PlanConfig(solver="icem", recorded=-1), "plan.recorded"),
        (lambda: TrainConfig(steps=0), "train.steps"),
        (lambda: EncoderConfig(kept_patches=-1), "encoder.kept_patches"),
        (lambda: EncoderConfig(image_size=28, kept_patches=5), "encoder.kept_patches"),
        (lambda: EncoderConfig(background_noise=-1.0), "encoder.background_noise"),
        (lambda: TrainConfig(coarse_steps=-1), "train.coarse_steps"),
        (lambda: TrainConfig(steps=10, coarse_steps=10), "train.coarse_steps"),
        (lambda: TrainConfig(lr=0.0), "train.lr"),
        (lambda: TrainConfig(batch_size=1), "train.batch_size"),
        (lambda: TrainConfig(warmup_steps=-1), "train.warmup_steps"),
        (lambda: TrainConfig(final_lr_fraction=1.5), "train.final_lr_fraction"),
        (lambda: TrainConfig(schedule_steps=0), "train.schedule_steps"),
        (lambda: TrainConfig(schedule="cosin"), "train.schedule"),
        (lambda: TrainConfig(precision="fp8"), "train.precision"),
        (lambda: PlanConfig(schedule="soonest", objective="summed"), "plan.objective"),
        (lambda: LoaderConfig(val_fraction=1.0), "loader.val_fraction"),
        (lambda: LoaderConfig(cache="tape"), "loader.cache"),
        (lambda: CollectConfig(workers=-1), "collect.workers"),
        (lambda: PlanConfig(elites=1), "plan.elites"),
        (lambda: PlanConfig(samples=10, elites=11), "plan.elites"),
        (lambda: PlanConfig(execute=6), "plan.execute"),
        (lambda: PlanConfig(execute=0), "plan.execute"),
        (lambda: EvalConfig(budget=0), "eval.budget"),
        (lambda: Config(seed=-1), "seed"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(build: Callable[[], object], field: str):
    with pytest.raises(ConfigError, match=rf"^{field.replace('.', '[.]')} must be .*, got "):
        build()


@pytest.mark.parametrize("coarse_steps", [1, 9])
def test_coarse_steps_need_patches_that_can_be_halved(coarse_steps: int):
    odd = ModelConfig(EncoderConfig(image_size=42))
    train = TrainConfig(steps=10, coarse_steps=coarse_steps)
    with pytest.raises(
        ConfigError, match=r"^train\.coarse_steps must be 0 .* 3 x 3 patches.*, got \d+\. .*multiple of 28"
    ):
        Config(model=odd, train=train)
    assert Config(model=odd).train.coarse_steps == 0
    some = ModelConfig(EncoderConfig(kept_patches=64))
    with pytest.raises(ConfigError, match=r"^train\.coarse_steps must be 0 .*kept_patches \(64\).*, got \d+\. "):
        Config(model=some, train=train)
    assert Config(model=some).model.encoder.title == "ViT/14 at 224 px, 64 of 256 patches (least like the background)"
    assert replace(some.encoder, background_noise=1.0).title.endswith("the background, give or take 1 of 255)")
    assert Config(train=train).train.coarse_steps == coarse_steps


def test_configurations_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        preset("debug").seed = 1  # type: ignore[misc]
