"""Which rollout a planner gets, and what is read of a model to tell."""

import warnings

import pytest
import torch

from lewm.kernels import rollout
from lewm.kernels.network import Sizes
from lewm.kernels.rollout import choose_rollout, planning_dtype
from lewm.kernels.rollout_fast import FastRollout
from lewm.methods.lewm import LeWM
from lewm.presets import preset


@pytest.fixture
def model() -> LeWM:
    torch.manual_seed(0)
    return LeWM(preset("debug").method).eval()


def test_auto_is_bf16_on_cuda_alone():
    for precision, device, expected in (
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("bf16", "cpu", torch.bfloat16),
        ("float32", "cuda", torch.float32),
    ):
        assert planning_dtype(precision, torch.device(device)) == expected


@pytest.mark.parametrize("precision", ["auto", "float32", "bf16"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_a_model_on_the_cpu_gets_the_plain_one(model: LeWM, precision: str, differentiable: bool):
    assert type(choose_rollout(model, precision, differentiable)) is FastRollout


class Kernels:
    """Stands for a rollout of kernels."""

    def __init__(self, model: LeWM) -> None:
        self.model = model


def test_kernels_are_taken_where_they_fit_and_nothing_else_is_asked_for(model: LeWM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout.rollout_triton, "supports", lambda _: True)
    monkeypatch.setattr(rollout, "TritonRollout", Kernels)
    assert type(choose_rollout(model, "bf16")) is Kernels
    assert type(choose_rollout(model, "float32")) is FastRollout
    assert type(choose_rollout(model, "bf16", differentiable=True)) is FastRollout


def test_without_a_compiler_planning_goes_on_with_a_warning(model: LeWM, monkeypatch: pytest.MonkeyPatch):
    def fail(_: LeWM) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(rollout.rollout_cluster, "supports", lambda _: True)
    monkeypatch.setattr(rollout, "ClusterRollout", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert type(choose_rollout(model, "bf16")) is FastRollout
    assert ["no compiler" in str(warning.message) for warning in caught] == [True]


def test_sizes_are_read_off_the_modules(model: LeWM):
    config = model.settings
    predictor = config.predictor
    expected = config.history, config.embed_dim, predictor.depth, predictor.heads, predictor.head_width
    assert Sizes.of(model) == Sizes(*expected, predictor.mlp_width, config.projector_width)
