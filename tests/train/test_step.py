"""One step: what it does to weights and their average, and the compiled parts that do the same."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch._dynamo.utils
from torch.nn.attention import _cur_sdpa_kernel_backends

from lewm.config import Config, preset
from lewm.model.world_model import LeWM
from lewm.train.compiled import Compilation, compile_parts, wants_compiling
from lewm.train.distributed import SINGLE
from lewm.train.optim import WeightAverage, make_optimizer
from lewm.train.step import ATTENTION_KERNELS, PlainStep, halve, phase_models, preferred_attention
from lewm.train.trainer import make_sigreg
from lewm.types import ActionStats, Batch

CPU = torch.device("cpu")


def deeper_without_dropout(config: Config) -> Config:
    encoder, predictor = config.model.encoder, config.model.predictor
    encoder, predictor = replace(encoder, depth=4), replace(predictor, depth=3, dropout=0.0)
    return replace(config, model=replace(config.model, encoder=encoder, predictor=predictor))


CONFIG = deeper_without_dropout(preset("debug"))


def new_model(kept_patches: int = 0) -> LeWM:
    torch.manual_seed(0)
    encoder = replace(CONFIG.model.encoder, kept_patches=kept_patches)
    model = LeWM(replace(CONFIG.model, encoder=encoder), ActionStats((0.0, 0.0), (1.0, 1.0)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture
def model() -> LeWM:
    return new_model()


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (4, 4, 28, 28, 3), dtype=torch.uint8, generator=generator)
    return Batch(pixels, torch.randn(4, 4, 5, 2, generator=generator))


def plain_step(model: LeWM, clip_norm: float = 1.0, average: WeightAverage | None = None) -> PlainStep:
    settings = replace(CONFIG.train, clip_norm=clip_norm)
    return PlainStep(model, make_sigreg(CONFIG), make_optimizer(model, settings), settings, average, SINGLE)


def test_the_gradient_is_clipped(model: LeWM, batch: Batch) -> None:
    directions_DM = make_sigreg(CONFIG).directions(8, 0, CPU)
    plain_step(model, clip_norm=0.01)(batch, directions_DM)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_results_keep_no_graph_alive(model: LeWM, batch: Batch) -> None:
    losses = plain_step(model)(batch, make_sigreg(CONFIG).directions(8, 0, CPU)).losses
    assert not any(t.requires_grad for t in (losses.total, losses.prediction, losses.sigreg, losses.z_BTD))


def test_the_average_follows_the_weights(model: LeWM, batch: Batch) -> None:
    average = WeightAverage(model, decay=0.75)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step, sigreg = plain_step(model, average=average), make_sigreg(CONFIG)
    for number in range(3):
        step(batch, sigreg.directions(8, number, CPU))
        for name, tensor in model.state_dict().items():
            new = 0.75 * expected[name] + 0.25 * tensor if tensor.is_floating_point() else tensor
            expected[name] = new.clone()
    found = average.model.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    assert not torch.equal(found["encoder.cls_token"], model.encoder.cls_token)
    # BatchNorm's statistics, too.
    assert not torch.equal(found["projector.1.running_mean"], model.state_dict()["projector.1.running_mean"])


@pytest.mark.parametrize(("coarse_steps", "kept_patches", "graphs"), [(0, 0, 6), (2, 0, 10), (0, 2, 5)])
def test_compiled_parts_do_the_same_without_breaks_or_recompilation(
    batch: Batch, coarse_steps: int, kept_patches: int, graphs: int
) -> None:
    """Traced as on a GPU, but run by torch's own operators: generating code takes minutes on a CPU.

    A predictor's block and the characteristic function are compiled once. Of the encoder four parts are compiled, for
    each phase that the run has: what is before the blocks, the first, those between, and the last with what follows.
    Without background the first is like those between: every frame has positions of its own.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = new_model(kept_patches)
    other, sigreg = copy.deepcopy(model), make_sigreg(CONFIG)
    settings = replace(CONFIG.train, compile="on", coarse_steps=coarse_steps)
    plain_models = phase_models(other, settings)
    fast_models, fast_sigreg = compile_parts(phase_models(model, settings), sigreg, settings, backend="aot_eager")
    before = copy.deepcopy(model.state_dict())
    assert Compilation(fast_models, fast_sigreg, replace(CONFIG, train=settings)).wait() > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name  # compiling leaves no trace in the model
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

    optimizers = [torch.optim.SGD(original.parameters(), lr=0.01) for original in (model, other)]
    for number in range(4):
        results = [
            PlainStep(models[number < coarse_steps], s, optimizer, settings, None, SINGLE)(
                batch, sigreg.directions(8, number, CPU)
            )
            for models, s, optimizer in zip((fast_models, plain_models), (fast_sigreg, sigreg), optimizers, strict=True)
        ]
        torch.testing.assert_close(results[0].losses.total, results[1].losses.total)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert model.state_dict().keys() == other.state_dict().keys()  # the original is not wrapped


def test_an_error_while_compiling_is_not_lost(model: LeWM) -> None:
    wrong = replace(CONFIG, model=replace(CONFIG.model, action_dim=3))
    with pytest.raises(RuntimeError, match=r"size|shape|match"):
        Compilation({False: model}, make_sigreg(CONFIG), wrong).wait()


@pytest.mark.parametrize(("float32_tokens", "expected"), [(False, torch.bfloat16), (True, torch.float32)])
def test_tokens_are_carried_in_the_precision_asked_for(
    model: LeWM, batch: Batch, float32_tokens: bool, expected: torch.dtype
) -> None:
    seen = []
    model.encoder.float32_tokens = float32_tokens
    model.encoder.blocks[-1].attention_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        z = model.encode(batch.pixels)
    assert seen == [expected]
    assert z.isfinite().all()


def test_where_steps_are_compiled() -> None:
    settings, gpu = CONFIG.train, torch.device("cuda")
    assert wants_compiling(settings, gpu)
    assert not wants_compiling(settings, CPU)
    assert wants_compiling(replace(settings, compile="on"), CPU)
    assert not wants_compiling(replace(settings, compile="off"), gpu)


@pytest.mark.parametrize("name", ["auto", "cudnn", "flash", "efficient", "math", "default"])
def test_every_kernel_setting_can_be_entered(name: str) -> None:
    usual = _cur_sdpa_kernel_backends(with_priority=True)
    with preferred_attention(replace(CONFIG.train, attention=name), torch.device("cuda")):
        inside = _cur_sdpa_kernel_backends(with_priority=True)
    expected = usual[0] if name == "default" else ATTENTION_KERNELS["cudnn" if name == "auto" else name]
    assert inside[0] == expected
    assert _cur_sdpa_kernel_backends(with_priority=True) == usual


# -- coarse frames --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (3,), (2, 4)])
def test_a_halved_frame_has_the_rounded_mean_of_each_square(leading: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    frames = torch.randint(0, 256, (*leading, 8, 8, 3), dtype=torch.uint8, generator=generator)
    found = halve(frames)
    assert (found.shape, found.dtype) == ((*leading, 4, 4, 3), torch.uint8)
    squares = frames.double().unflatten(-3, (4, 2)).unflatten(-2, (4, 2))
    assert torch.equal(found.double(), (squares.mean((-4, -2)) + 0.5).floor())


@pytest.mark.parametrize(
    ("square", "mean"), [((255,) * 4, 255), ((0, 0, 0, 1), 0), ((0, 0, 1, 1), 1), ((254, 255, 254, 255), 255)]
)
def test_halving_neither_overflows_nor_darkens(square: tuple[int, ...], mean: int) -> None:
    frame = torch.tensor(square, dtype=torch.uint8).view(2, 2, 1).expand(2, 2, 3)
    assert halve(frame).flatten().tolist() == [mean] * 3


def test_a_coarse_step_is_a_step_on_halved_frames(model: LeWM, batch: Batch) -> None:
    settings = replace(CONFIG.train, coarse_steps=1)
    coarse = phase_models(model, settings)[True].eval()
    expected = model.projector(model.encoder(halve(batch.pixels).flatten(0, 1)))
    assert torch.equal(coarse.encode(batch.pixels).flatten(0, 1), expected)
    assert {id(p) for p in coarse.parameters()} == {id(p) for p in model.parameters()}
    assert (model.encode(batch.pixels).flatten(0, 1) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("coarse_steps", "phases"), [(0, [False]), (3, [True, False]), (7, [True, False])])
def test_the_phases_of_a_run(model: LeWM, coarse_steps: int, phases: list[bool]) -> None:
    assert list(phase_models(model, replace(CONFIG.train, steps=8, coarse_steps=coarse_steps))) == phases


def test_only_the_compilers_remarks_are_kept_from_the_user(model: LeWM) -> None:
    remarks = (
        "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction.",
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
    )
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        compile_parts(phase_models(model, CONFIG.train), make_sigreg(CONFIG), CONFIG.train, backend="aot_eager")
        for text in (*remarks, "something is wrong"):
            warnings.warn_explicit(text, UserWarning, "compile_fx.py", 1, module="torch._inductor.compile_fx")
        warnings.warn_explicit(remarks[1], UserWarning, "mine.py", 1, module="mine")
    assert [str(warning.message) for warning in shown] == ["something is wrong", remarks[1]]
