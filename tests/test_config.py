"""Configurations: their defaults, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from lewm.config import (
    CollectConfig,
    Config,
    EncoderConfig,
    EvalConfig,
    IcemConfig,
    LoaderConfig,
    PlanConfig,
    PredictorConfig,
    TrainConfig,
)
from lewm.errors import ConfigError
from lewm.methods.lewm import LeWMConfig, SigregConfig
from lewm.presets import preset, read_config


def test_the_defaults_are_the_papers_configuration():
    config = Config(LeWMConfig())
    encoder, predictor = config.method.encoder, config.method.predictor
    assert (encoder.image_size, encoder.patch_size, encoder.depth, encoder.heads, encoder.width) == (
        224,
        14,
        12,
        3,
        192,
    )
    assert (predictor.depth, predictor.heads, predictor.dropout) == (6, 16, 0.1)
    assert (config.method.embed_dim, config.method.history, config.method.frame_skip) == (192, 3, 5)
    assert (config.method.sigreg.weight, config.method.sigreg.directions, config.method.sigreg.knots) == (
        0.09,
        1024,
        17,
    )
    assert (config.train.batch_size, config.train.lr, config.train.weight_decay) == (128, 5e-5, 1e-3)
    assert (config.plan.samples, config.plan.elites, config.plan.iterations) == (300, 30, 30)
    assert (config.eval.episodes, config.eval.budget) == (50, 50)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sede": 1}, "Unknown field 'sede'. Did you mean 'seed'"),
        ({"train": {"stepz": 1}}, "Unknown field 'train.stepz'. Did you mean 'train.steps'"),
        (
            {"method": {"encoder": {"dept": 1}}},
            "Unknown field 'method.encoder.dept'. Did you mean 'method.encoder.depth'",
        ),
        ({"method": {"sigrge": {}}}, "Unknown field 'method.sigrge'. Did you mean 'method.sigreg'"),
        ({"method": {"name": "lwm"}}, "Unknown method 'lwm'. Did you mean 'lewm'?"),
    ],
)
def test_an_unknown_field_names_the_nearest(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        read_config(values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: EncoderConfig(depth=0), "method.encoder.depth"),
        (lambda: EncoderConfig(image_size=100), "method.encoder.image_size"),
        (lambda: EncoderConfig(heads=5), "method.encoder.width"),
        (lambda: PredictorConfig(dropout=1.0), "method.predictor.dropout"),
        (lambda: PredictorConfig(heads=-1), "method.predictor.heads"),
        (lambda: LeWMConfig(history=0), "method.history"),
        (lambda: LeWMConfig(action_bottleneck=0), "method.action_bottleneck"),
        (lambda: SigregConfig(weight=-0.1), "method.sigreg.weight"),
        (lambda: SigregConfig(knots=1), "method.sigreg.knots"),
        (lambda: PlanConfig(solver="icem", icem=IcemConfig(recorded=31)), "plan.icem.recorded"),
        (lambda: IcemConfig(recorded=-1), "plan.icem.recorded"),
        (lambda: TrainConfig(steps=0), "train.steps"),
        (lambda: EncoderConfig(kept_patches=-1), "method.encoder.kept_patches"),
        (lambda: EncoderConfig(image_size=28, kept_patches=5), "method.encoder.kept_patches"),
        (lambda: EncoderConfig(background_noise=-1.0), "method.encoder.background_noise"),
        (lambda: TrainConfig(lr=0.0), "train.lr"),
        (lambda: TrainConfig(batch_size=1), "train.batch_size"),
        (lambda: TrainConfig(warmup_steps=-1), "train.warmup_steps"),
        (lambda: TrainConfig(final_lr_fraction=1.5), "train.final_lr_fraction"),
        (lambda: TrainConfig(schedule_steps=0), "train.schedule_steps"),
        (lambda: PlanConfig(schedule="soonest", objective="nearest"), "plan.objective"),
        (lambda: LoaderConfig(val_fraction=1.0), "loader.val_fraction"),
        (lambda: CollectConfig(workers=-1), "collect.workers"),
        (lambda: PlanConfig(elites=1), "plan.elites"),
        (lambda: PlanConfig(samples=10, elites=11), "plan.elites"),
        (lambda: EvalConfig(budget=0), "eval.budget"),
        (lambda: Config(LeWMConfig(), seed=-1), "seed"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(build: Callable[[], object], field: str):
    with pytest.raises(ConfigError, match=rf"^{field.replace('.', '[.]')} must be .*, got "):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TrainConfig(precision="fp8"), "Unknown train.precision 'fp8'. Known: auto, bf16, float32."),
        (lambda: TrainConfig(compile="max"), "Unknown train.compile 'max'."),
        (lambda: LoaderConfig(cache="tape"), "Unknown loader.cache 'tape'."),
        (lambda: PlanConfig(schedule="sonest"), "Unknown plan.schedule 'sonest'. Did you mean 'soonest'?"),
        (lambda: TrainConfig(steps=10.5), "train.steps must be a whole number, got 10.5."),
        (lambda: TrainConfig(steps="10"), "train.steps must be a whole number, got '10'."),
        (lambda: TrainConfig(steps=True), "train.steps must be a whole number, got True."),
        (lambda: TrainConfig(cuda_graph=1), "train.cuda_graph must be true or false, got 1."),
        (lambda: TrainConfig(lr=float("nan")), "train.lr must be a finite number, got nan."),
        (lambda: TrainConfig(lr=None), "train.lr must be a number, got None."),
        (lambda: PlanConfig(budget_ms=float("inf")), "plan.budget_ms must be a finite number, got inf."),
        (lambda: SigregConfig(knots=10**12), "method.sigreg.knots must be at most 1,000,000,000, got 1000000000000."),
        (lambda: EncoderConfig(image_size=14 * 500), "method.encoder.image_size must be at most 4,096, got 7000."),
        (lambda: Config(LeWMConfig(), seed=2**63), "seed must be at most 9,223,372,036,854,775,807"),
        (lambda: Config(LeWMConfig(), plan=3), "plan must be PlanConfig, got 3."),
        (lambda: read_config({"plan": 3}), "plan must be an object of settings, got 3."),
        (lambda: read_config([]), "The configuration must be an object of settings, got []."),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(build: Callable[[], object], message: str):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)


def test_configurations_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        preset("debug").seed = 1  # type: ignore[misc]
